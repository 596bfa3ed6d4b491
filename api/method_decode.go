package api

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/weir-run/weir/api/rpc/scan"
)

// decode reads text, which may come from a stranger, into v in one pass, and
// checks it on the way. Nothing of v keeps memory of text. It returns the
// idempotency key that counts: the member of that name, else the given one.
// Error: *InvalidError.
func (n *plan) decode(text []byte, v reflect.Value, key string) (string, error) {
	d := paramsDecoder{Scanner: scan.New(text), key: key}
	err := d.value(n, v)
	if err == nil {
		err = d.End()
	}
	if errors.Is(err, scan.ErrSyntax) || errors.Is(err, scan.ErrDepth) {
		err = invalid("must be JSON")
	}
	if err == nil && d.key != "" {
		err = checkKey(d.key)
	}
	return d.key, err
}

type paramsDecoder struct {
	scan.Scanner
	key   string
	depth int // of structs
}

// maxKey is the size of the longest idempotency key in bytes (RC-25).
const maxKey = 128

func checkKey(key string) error {
	if len(key) > maxKey {
		return &InvalidError{Field: "idempotencyKey", Reason: "invalid", Message: fmt.Sprintf("must be at most %d bytes", maxKey)}
	}
	if !utf8.ValidString(key) || strings.ContainsFunc(key, isControl) {
		return &InvalidError{Field: "idempotencyKey", Reason: "invalid", Message: "must be text without control characters"}
	}
	return nil
}

func isControl(r rune) bool {
	return r < ' ' || r >= 0x7f && r < 0xa0
}

func invalid(format string, args ...any) error {
	return &InvalidError{Reason: "invalid", Message: fmt.Sprintf(format, args...)}
}

// value reads the next value into v, which is zero.
func (d *paramsDecoder) value(n *plan, v reflect.Value) error {
	var err error
	switch n.kind {
	case kindString:
		err = d.string(n, v)
	case kindBool:
		err = d.bool(v)
	case kindInt, kindUint, kindFloat:
		err = d.number(n, v)
	case kindStruct:
		err = d.object(n.object, v)
	case kindList:
		err = d.list(n, v)
	case kindMap:
		err = d.members(n, v)
	case kindPointer:
		p := reflect.New(v.Type().Elem())
		if err := d.value(n.elem, p.Elem()); err != nil {
			return err
		}
		v.Set(p)
		return nil
	case kindRaw:
		var raw []byte
		if raw, err = d.Value(); err == nil {
			v.SetBytes(slices.Clone(raw))
		}
	case kindBytes:
		err = d.bytes(v)
	case kindCustom:
		err = d.custom(v)
	}
	if err == nil && n.validate {
		err = v.Addr().Interface().(validator).Validate()
	}
	return err
}

// fieldSet is a set of the fields of an object.
type fieldSet [maxFields / 64]uint64

func (s *fieldSet) add(i int)      { s[i/64] |= 1 << (i % 64) }
func (s *fieldSet) has(i int) bool { return s[i/64]&(1<<(i%64)) != 0 }

func (d *paramsDecoder) object(o *structPlan, v reflect.Value) error {
	if d.Kind() != scan.Object {
		return d.other("must be an object")
	}
	if err := d.Open(); err != nil {
		return err
	}
	d.depth++
	var seen, present fieldSet
	for first := true; ; first = false {
		name, err := d.Key(first)
		if err != nil {
			return err
		}
		if name == nil {
			break
		}
		i, ok := o.find(name)
		if !ok {
			if err := d.unknown(o, v, name); err != nil {
				return err
			}
			continue
		}
		f := &o.fields[i]
		if seen.has(i) {
			return &InvalidError{Field: f.name, Reason: "duplicate", Message: "is there twice"}
		}
		seen.add(i)
		if !f.plan.acceptsNull && d.Kind() == scan.Null {
			if _, err := d.Value(); err != nil {
				return err
			}
			continue
		}
		present.add(i)
		if err := d.value(f.plan, f.of(v)); err != nil {
			return d.within(f.name, err)
		}
	}
	d.depth--
	for i := range o.fields {
		f := &o.fields[i]
		switch {
		case present.has(i):
			if i == o.keyed && d.depth == 0 {
				if d.key = f.of(v).String(); d.key == "" {
					return &InvalidError{Field: f.name, Reason: "invalid", Message: "must not be empty"}
				}
			}
		case f.required:
			return &InvalidError{Field: f.name, Reason: "required", Message: "is required"}
		case i == o.keyed && d.depth == 0 && d.key != "":
			f.of(v).SetString(d.key)
		case f.absent.IsValid():
			f.of(v).Set(f.absent)
		}
	}
	return nil
}

// within adds the name of a member to an error about it, not to one about the
// text as such.
func (d *paramsDecoder) within(name string, err error) error {
	if errors.Is(err, scan.ErrSyntax) || errors.Is(err, scan.ErrDepth) {
		return err
	}
	return within(name, err)
}

func (f *fieldPlan) of(v reflect.Value) reflect.Value {
	if len(f.index) == 1 {
		return v.Field(f.index[0])
	}
	return v.FieldByIndex(f.index)
}

// find returns the field of a member by its name as it is written.
func (o *structPlan) find(name []byte) (int, bool) {
	if i, ok := o.byName[string(name[1:len(name)-1])]; ok {
		return i, true
	}
	if !slices.Contains(name, '\\') {
		return 0, false
	}
	i, ok := o.byName[scan.Unquote(name)]
	return i, ok
}

// unknown reads the value of a member that the object does not name.
func (d *paramsDecoder) unknown(o *structPlan, v reflect.Value, name []byte) error {
	if o.strict {
		return &InvalidError{Field: scan.Unquote(name), Reason: "unknown", Message: "is not known here"}
	}
	isKey := d.depth == 1 && o.keyed < 0 && string(name) == `"idempotencyKey"`
	isString := d.Kind() == scan.String
	raw, err := d.Value()
	if err != nil {
		return err
	}
	if isKey && string(raw) != "null" {
		if !isString || len(raw) == 2 {
			return &InvalidError{Field: "idempotencyKey", Reason: "invalid", Message: "must be a string that is not empty"}
		}
		d.key = scan.Unquote(raw)
		return nil
	}
	if o.rest == nil {
		return nil
	}
	rest := v.FieldByIndex(o.rest).Addr().Interface().(*map[string]json.RawMessage)
	if *rest == nil {
		*rest = make(map[string]json.RawMessage)
	}
	member := scan.Unquote(name)
	if _, ok := (*rest)[member]; ok {
		return &InvalidError{Field: member, Reason: "duplicate", Message: "is there twice"}
	}
	(*rest)[member] = slices.Clone(raw)
	return nil
}

// other reads a value of a wrong kind and returns the error about it, unless
// it is not even JSON.
func (d *paramsDecoder) other(message string) error {
	if _, err := d.Value(); err != nil {
		return err
	}
	return invalid("%s", message)
}

func (d *paramsDecoder) string(n *plan, v reflect.Value) error {
	if d.Kind() != scan.String {
		return d.other("must be a string")
	}
	raw, err := d.Value()
	if err != nil {
		return err
	}
	// Unquoted, it is not longer than as it is written, but may be shorter: an
	// escape takes up to six bytes for each.
	if (len(raw)-2)/6 > n.maxBytes {
		return tooLarge(n)
	}
	s := scan.Unquote(raw)
	if len(s) > n.maxBytes {
		return tooLarge(n)
	}
	// Characters are counted only where bytes do not already tell.
	if n.minLength > 0 && len(s) < n.minLength*utf8.UTFMax && utf8.RuneCountInString(s) < n.minLength {
		if n.minLength == 1 {
			return invalid("must not be empty")
		}
		return invalid("must be at least %d characters", n.minLength)
	}
	if len(s) > n.maxLength && utf8.RuneCountInString(s) > n.maxLength {
		return invalid("must be at most %d characters", n.maxLength)
	}
	if n.strings != nil && !slices.Contains(n.strings, s) {
		return invalid("must be one of %s", strings.Join(n.strings, ", "))
	}
	if n.pattern != nil && !n.pattern.MatchString(s) {
		return invalid("must match %s", n.pattern)
	}
	v.SetString(s)
	return nil
}

func tooLarge(n *plan) error {
	return &InvalidError{Reason: "too_large", Message: fmt.Sprintf("must be at most %d bytes", n.maxBytes)}
}

func (d *paramsDecoder) bool(v reflect.Value) error {
	kind := d.Kind()
	if kind != scan.True && kind != scan.False {
		return d.other("must be true or false")
	}
	if _, err := d.Value(); err != nil {
		return err
	}
	v.SetBool(kind == scan.True)
	return nil
}

func (d *paramsDecoder) number(n *plan, v reflect.Value) error {
	message := "must be a number"
	if n.kind != kindFloat {
		message = "must be an integer"
	}
	if d.Kind() != scan.Number {
		return d.other(message)
	}
	raw, err := d.Value()
	if err != nil {
		return err
	}
	var f float64
	switch n.kind {
	case kindInt:
		i, err := strconv.ParseInt(string(raw), 10, n.bits)
		if err != nil {
			if i, err = whole[int64](raw); err != nil || v.OverflowInt(i) {
				return invalid("%s", message)
			}
		}
		v.SetInt(i)
		f = float64(i)
	case kindUint:
		i, err := strconv.ParseUint(string(raw), 10, n.bits)
		if err != nil {
			if i, err = whole[uint64](raw); err != nil || v.OverflowUint(i) {
				return invalid("%s", message)
			}
		}
		v.SetUint(i)
		f = float64(i)
	default:
		if f, err = strconv.ParseFloat(string(raw), n.bits); err != nil {
			return invalid("%s", message)
		}
		v.SetFloat(f)
	}
	switch {
	case f < n.minimum:
		return invalid("must be at least %s", n.minimumS)
	case n.above && f == n.minimum:
		return invalid("must be above %s", n.minimumS)
	case f > n.maximum:
		return invalid("must be at most %s", n.maximumS)
	case n.below && f == n.maximum:
		return invalid("must be below %s", n.maximumS)
	case n.numbers != nil && !slices.Contains(n.numbers, f):
		return invalid("must be one of %s", strings.Trim(fmt.Sprint(n.numbers), "[]"))
	}
	return nil
}

// whole reads an integer that is written as a fraction or with an exponent, as
// some clients do with numbers that once were floating-point: 20.0, 2e1.
func whole[T int64 | uint64](raw []byte) (T, error) {
	const exact = 1 << 53
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || f != math.Trunc(f) || math.Abs(f) > exact || f < 0 && T(0)-1 > 0 {
		return 0, strconv.ErrRange
	}
	return T(f), nil
}

func (d *paramsDecoder) list(n *plan, v reflect.Value) error {
	if d.Kind() != scan.Array {
		return d.other("must be a list")
	}
	if err := d.Open(); err != nil {
		return err
	}
	v.Set(reflect.MakeSlice(v.Type(), 0, 0))
	for i := 0; ; i++ {
		more, err := d.Item(i == 0)
		if err != nil {
			return err
		}
		if !more {
			break
		}
		if i == n.maxLength {
			return invalid("must have at most %d items", n.maxLength)
		}
		if i == v.Cap() {
			v.Grow(1)
		}
		v.SetLen(i + 1)
		item := v.Index(i)
		item.SetZero()
		if err := d.value(n.elem, item); err != nil {
			return d.within("["+strconv.Itoa(i)+"]", err)
		}
	}
	if v.Len() < n.minLength {
		return invalid("must have at least %d items", n.minLength)
	}
	return nil
}

// members reads an object into a map.
func (d *paramsDecoder) members(n *plan, v reflect.Value) error {
	if d.Kind() != scan.Object {
		return d.other("must be an object")
	}
	if err := d.Open(); err != nil {
		return err
	}
	d.depth++
	v.Set(reflect.MakeMap(v.Type()))
	for first := true; ; first = false {
		raw, err := d.Key(first)
		if err != nil {
			return err
		}
		if raw == nil {
			d.depth--
			return nil
		}
		name := scan.Unquote(raw)
		key := reflect.ValueOf(name).Convert(v.Type().Key())
		if v.MapIndex(key).IsValid() {
			return &InvalidError{Field: name, Reason: "duplicate", Message: "is there twice"}
		}
		value := reflect.New(v.Type().Elem()).Elem()
		if err := d.value(n.elem, value); err != nil {
			return d.within(name, err)
		}
		v.SetMapIndex(key, value)
	}
}

func (d *paramsDecoder) bytes(v reflect.Value) error {
	if d.Kind() != scan.String {
		return d.other("must be a string")
	}
	raw, err := d.Value()
	if err != nil {
		return err
	}
	b, err := base64.StdEncoding.DecodeString(scan.Unquote(raw))
	if err != nil {
		return invalid("must be base64")
	}
	v.SetBytes(b)
	return nil
}

// custom lets a type decode itself.
func (d *paramsDecoder) custom(v reflect.Value) error {
	raw, err := d.Value()
	if err != nil {
		return err
	}
	err = json.Unmarshal(raw, v.Addr().Interface())
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*InvalidError](err); ok {
		return e
	}
	if v.Type() == timeType {
		return invalid("must be a time as in 2026-01-31T12:00:00Z")
	}
	return invalid("is not valid")
}
