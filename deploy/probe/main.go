// Command probe asks one URL and exits 0 when it answers 200. It is in the
// image for container engines that probe with a command: the image has no
// shell and no curl.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

// patience is longer than /readyz ever thinks (2 s).
const patience = 3 * time.Second

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: probe URL")
		os.Exit(2)
	}
	if err := probe(os.Args[1], patience); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

// probe returns nil when url answers 200 in time.
func probe(url string, within time.Duration) error {
	client := http.Client{Timeout: within}
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10)) // engines show it to people
		return fmt.Errorf("%s answers %s: %s", url, resp.Status, body)
	}
	return nil
}
