//go:build unix

package cluster

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestFetch downloads from a repository on this machine, whose archive holds
// scripts that call the Postgres installed here: all of the way but Maven
// Central and its binaries.
func TestFetch(t *testing.T) {
	t.Parallel()
	t.Cleanup(http.DefaultClient.CloseIdleConnections)

	t.Run("ServesACluster", func(t *testing.T) {
		t.Parallel()
		installed, err := Find(t.Context(), Config{NoFetch: true})
		require.NoError(t, err)
		var downloads atomic.Int32
		config := Config{CacheDir: publicDir(t), repository: repository(t, installed.Dir, &downloads)}

		var wg sync.WaitGroup
		results := make([]string, 4)
		for i := range results {
			wg.Go(func() {
				dir, err := fetch(t.Context(), config, 0)
				if err == nil {
					results[i] = dir
				}
			})
		}
		wg.Wait()
		for _, dir := range results {
			require.Equal(t, filepath.Join(config.CacheDir, string(fetchVersions[fetchMajor]), "bin"), dir)
		}
		require.EqualValues(t, 1, downloads.Load(), "four at once download once")
		entries, err := os.ReadDir(config.CacheDir)
		require.NoError(t, err)
		require.Len(t, entries, 2, "the version and the lock")

		c := start(t, Config{Ephemeral: true, BinDir: results[0]})
		require.Equal(t, "1", query(t, c.URL("postgres"), "SELECT '1'"))
	})

	t.Run("IsTheLastResortOfFind", func(t *testing.T) {
		t.Parallel()
		installed, err := Find(t.Context(), Config{NoFetch: true})
		require.NoError(t, err)
		// Data of a version that is not installed, but can be had.
		missing := 18
		if installed.Major == missing {
			missing = 17
		}
		dir := publicDir(t)
		require.NoError(t, os.Mkdir(filepath.Join(dir, "pgdata"), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "pgdata", "PG_VERSION"), []byte("18\n"), 0o600))
		var downloads atomic.Int32
		found, err := find(t.Context(), Config{CacheDir: publicDir(t), repository: repository(t, installed.Dir, &downloads)}, missing, nil)
		require.NoError(t, err)
		require.Contains(t, found.Dir, string(fetchVersions[missing]))
	})

	t.Run("FailureSaysWhatToDo", func(t *testing.T) {
		t.Parallel()
		gone := httptest.NewServer(http.NotFoundHandler())
		t.Cleanup(gone.Close)
		_, err := find(t.Context(), Config{CacheDir: publicDir(t), repository: gone.URL}, 18, nil)
		require.ErrorContains(t, err, "download: no version found")
		require.ErrorContains(t, err, "install it")
		_, err = fetch(t.Context(), Config{CacheDir: publicDir(t)}, 9)
		require.ErrorContains(t, err, "no Postgres 9 to download")
	})

	t.Run("EndsWithItsContext", func(t *testing.T) {
		t.Parallel()
		release := make(chan struct{})
		slow := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
		t.Cleanup(slow.Close)
		t.Cleanup(func() { close(release) })
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := fetch(ctx, Config{CacheDir: publicDir(t), repository: slow.URL}, 0)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

// repository serves one archive for every version and platform.
func repository(t *testing.T, binDir string, downloads *atomic.Int32) string {
	t.Helper()
	var files bytes.Buffer
	tarball := tar.NewWriter(&files)
	for _, program := range []string{"initdb", "pg_ctl", "postgres"} {
		script := "#!/bin/sh\nexec " + filepath.Join(binDir, program) + ` "$@"` + "\n"
		require.NoError(t, tarball.WriteHeader(&tar.Header{Name: "bin/" + program, Mode: 0o755, Size: int64(len(script))}))
		_, err := tarball.Write([]byte(script))
		require.NoError(t, err)
	}
	require.NoError(t, tarball.Close())

	var jar bytes.Buffer
	archive := zip.NewWriter(&jar)
	entry, err := archive.Create("postgres.txz")
	require.NoError(t, err)
	_, err = entry.Write(xzStored(files.Bytes()))
	require.NoError(t, err)
	require.NoError(t, archive.Close())
	sum := sha256.Sum256(jar.Bytes())

	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, ".sha256") {
			_, _ = w.Write([]byte(hex.EncodeToString(sum[:])))
			return
		}
		downloads.Add(1)
		_, _ = w.Write(jar.Bytes())
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// xzStored wraps up to 64 KiB in the xz format, uncompressed
// (https://tukaani.org/xz/xz-file-format.txt).
func xzStored(data []byte) []byte {
	sum := func(b []byte) []byte { return binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE(b)) }
	pad := func(b []byte) []byte { return append(b, make([]byte, (4-len(b)%4)%4)...) }
	flags := []byte{0, 1} // checked by CRC32

	header := []byte{2, 0, 0x21, 1, 0, 0, 0, 0} // 12 bytes with its sum; one filter: LZMA2 with the smallest dictionary
	block := append(header, sum(header)...)
	block = append(block, 1) // a stored chunk that resets the dictionary
	block = binary.BigEndian.AppendUint16(block, uint16(len(data)-1))
	block = append(append(block, data...), 0)
	unpadded := len(block) + 4
	block = append(pad(block), sum(data)...)

	index := []byte{0, 1}
	index = binary.AppendUvarint(index, uint64(unpadded))
	index = pad(binary.AppendUvarint(index, uint64(len(data))))
	index = append(index, sum(index)...)

	footer := append(binary.LittleEndian.AppendUint32(nil, uint32(len(index)/4-1)), flags...)
	out := append([]byte{0xFD, '7', 'z', 'X', 'Z', 0}, append(flags, sum(flags)...)...)
	out = append(append(out, block...), index...)
	out = append(append(out, sum(footer)...), footer...)
	return append(out, 'Y', 'Z')
}
