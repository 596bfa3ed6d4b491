package tool

import (
	"fmt"
	"net/netip"
	"syscall"
)

// forbiddenError reports an address that may not be called. It does not name
// the address: what an internal name resolves to is nothing for a model.
type forbiddenError struct{ what string }

func (e *forbiddenError) Error() string { return "this address may not be called: it is " + e.what }

// block is a range of addresses that are not on the public internet.
type block struct {
	prefix netip.Prefix
	what   string
}

// blocks is the special-purpose registry of IANA (RFC 6890), with the metadata
// addresses of clouds that stand outside of it.
var blocks = func() []block {
	var all []block
	for _, group := range []struct {
		what     string
		prefixes []string
	}{
		{"a metadata address", []string{"169.254.169.254/32", "168.63.129.16/32", "100.100.100.200/32", "fd00:ec2::254/128"}},
		{"a private address", []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10"}},
		{"a loopback address", []string{"127.0.0.0/8", "::1/128"}},
		{"a link-local address", []string{"169.254.0.0/16", "fe80::/10"}},
		{"a shared address", []string{"100.64.0.0/10"}}, // carrier-grade NAT
		{"a multicast address", []string{"224.0.0.0/4", "ff00::/8"}},
		{"an unspecified address", []string{"0.0.0.0/8", "::/96"}},
		{"a reserved address", []string{
			"192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4",
			"64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16",
		}},
	} {
		for _, prefix := range group.prefixes {
			all = append(all, block{netip.MustParsePrefix(prefix), group.what})
		}
	}
	return all
}()

// The ranges whose addresses hold an IPv4 address, and where in it.
var (
	nat64  = netip.MustParsePrefix("64:ff9b::/96")
	sixTo4 = netip.MustParsePrefix("2002::/16")
)

// forbidden says why an address may not be called, or "".
func forbidden(addr netip.Addr) string {
	addr = addr.Unmap().WithZone("")
	if b := addr.As16(); nat64.Contains(addr) {
		return forbidden(netip.AddrFrom4([4]byte(b[12:16])))
	} else if sixTo4.Contains(addr) {
		return forbidden(netip.AddrFrom4([4]byte(b[2:6])))
	}
	for _, b := range blocks {
		if b.prefix.Contains(addr) {
			return b.what
		}
	}
	return ""
}

// guard returns the check that a dialer makes between DNS and connect.
func guard(forbid func(netip.Addr) string) func(network, address string, _ syscall.RawConn) error {
	return func(_, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return fmt.Errorf("read the address that is dialled: %w", err)
		}
		if what := forbid(to.Addr()); what != "" {
			return &forbiddenError{what}
		}
		return nil
	}
}
