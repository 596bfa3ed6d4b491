package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/weir-run/weir/client/load"
)

// printProgress tells in one line what happened since the line before.
func printProgress(w io.Writer, p load.Progress) {
	per := func(n int64) string { return fmt.Sprintf("%.0f/s", float64(n)/p.Interval.Seconds()) }
	at := fmt.Sprintf("%.0fs", p.Elapsed.Seconds())
	switch {
	case p.Draining:
		at = "ending"
	case p.Elapsed < 0:
		at = "warm-up"
	}
	line := fmt.Sprintf("%8s  in flight %-5d sent %-8s ok %-8s", at, p.InFlight, per(p.Sent), per(p.OK))
	if p.OK > 0 {
		line += fmt.Sprintf(" p50 %-7s p99 %-7s max %-7s", span(p.P50), span(p.P99), span(p.Max))
	}
	for _, c := range []struct {
		what string
		n    int64
	}{{"rejected", p.Rejected}, {"failed", p.Failed}, {"unsent", p.Unsent}} {
		if c.n > 0 {
			line += fmt.Sprintf(" %s %d", c.what, c.n)
		}
	}
	fmt.Fprintln(w, strings.TrimRight(line, " "))
}

// span is a latency in three digits.
func span(d time.Duration) string {
	value, unit := d.Seconds()*1000, "ms"
	if d >= time.Second {
		value, unit = d.Seconds(), "s"
	}
	digits := 0
	for limit := 100.0; value < limit && digits < 2; limit /= 10 {
		digits++
	}
	return strconv.FormatFloat(value, 'f', digits, 64) + unit
}

func spanMs(ms float64) string { return span(time.Duration(ms * float64(time.Millisecond))) }

// printLoad is a result for people.
func printLoad(w io.Writer, r *load.Result) {
	fmt.Fprintf(w, "%s\n\n", loadTitle(r))
	rows := []load.TenantStats{{Name: "all", Stats: r.Total}}
	if len(r.Tenants) > 1 {
		rows = append(rows, r.Tenants...)
	}
	t := newTable(w, "TENANT", "SENT", "OK", "REJECTED", "FAILED", "UNSENT", "SENT/S", "OK/S")
	for _, s := range rows {
		t.row(s.Name, s.Sent, s.OK, s.Rejected, s.Failed, s.Unsent, fmt.Sprintf("%.1f", s.SentPerSecond), fmt.Sprintf("%.1f", s.OKPerSecond))
	}
	_ = t.flush()
	if len(r.Total.LatencyMs) > 0 {
		fmt.Fprintln(w)
		t = newTable(w, "TENANT", "LATENCY", "COUNT", "MEAN", "P50", "P90", "P99", "P99.9", "MAX")
		for _, s := range rows {
			for _, phase := range load.Phases {
				if l := s.LatencyMs[phase]; l != nil {
					t.row(s.Name, phase, l.Count, spanMs(l.Mean), spanMs(l.P50), spanMs(l.P90), spanMs(l.P99), spanMs(l.P999), spanMs(l.Max))
				}
			}
		}
		_ = t.flush()
	}
	if len(r.Total.Errors) > 0 {
		fmt.Fprintln(w)
		t = newTable(w, "CODE", "COUNT", "IS", "MESSAGE")
		for _, e := range r.Total.Errors {
			is := "failed"
			if e.Rejected {
				is = "rejected"
			}
			t.row(e.Code, e.Count, is, short(e.Message, 90))
		}
		_ = t.flush()
	}
	for _, note := range loadNotes(r) {
		fmt.Fprintf(w, "\n%s\n", note)
	}
}

// loadTitle says what load it was.
func loadTitle(r *load.Result) string {
	levels := make([]string, len(r.Level))
	for i, l := range r.Level {
		levels[i] = strconv.FormatFloat(l.Level, 'f', -1, 64)
	}
	what := map[load.Mode]string{
		load.Execute: "agent.execute", load.Accept: "agent.request, accepted only", load.Split: "agent.request and run.get",
	}[r.Mode]
	level := strings.Join(levels, " → ")
	if r.Loop == "open" {
		what = fmt.Sprintf("%s: open loop, %s turns/s (%s)", what, level, r.Spacing)
	} else {
		what = fmt.Sprintf("%s: closed loop, %s users", what, level)
	}
	what += ", " + brief(time.Duration(r.WindowMs*float64(time.Millisecond)))
	if r.WarmupMs > 0 {
		what += " after " + brief(time.Duration(r.WarmupMs*float64(time.Millisecond))) + " of warm-up"
	}
	if r.Interrupted {
		what += ", interrupted"
	}
	return what
}

// loadNotes are what to know before believing the numbers.
func loadNotes(r *load.Result) (notes []string) {
	if n := r.Total.Abandoned; n > 0 {
		notes = append(notes, fmt.Sprintf("%d turns were under way when the load was cut off.", n))
	}
	if n := r.Total.Unsent; n > 0 {
		notes = append(notes, fmt.Sprintf("%d turns were due and not sent: --max-in-flight were under way.", n))
	}
	if n := r.WarmupFailed; n > 0 {
		notes = append(notes, fmt.Sprintf("%d turns of the warm-up failed; they are not counted.", n))
	}
	if l := r.LatenessMs; l != nil {
		notes = append(notes, fmt.Sprintf("Turns were sent %s after they were due (p99; at most %s), which is part of their latency.", spanMs(l.P99), spanMs(l.Max)))
	}
	return notes
}
