package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// series names one number of one contestant, measured once a round.
type series struct{ contestant, metric string }

// goal is a bound on ours, or on the ratio of ours to other.
type goal struct {
	what    string
	ours    series
	other   series // zero for an absolute goal
	atLeast bool   // else at most
	bound   float64
}

func atLeast(bound float64, what string, ours, other series) goal {
	return goal{what, ours, other, true, bound}
}

func atMost(bound float64, what string, ours, other series) goal {
	return goal{what, ours, other, false, bound}
}

// sample is one number of one round.
type sample struct {
	Section    string  `json:"section"`
	Round      int     `json:"round"`
	Contestant string  `json:"contestant"`
	Metric     string  `json:"metric"`
	Value      float64 `json:"value"`
}

// verdict is what became of a goal.
type verdict struct {
	Section string    `json:"section"`
	Goal    string    `json:"goal"`
	Ours    float64   `json:"ours"`            // median of the rounds
	Other   float64   `json:"other,omitempty"` // the same of the comparator
	Ratios  []float64 `json:"ratios,omitempty"`
	Reached float64   `json:"reached"` // the median ratio, or ours
	AtLeast bool      `json:"at_least"`
	Bound   float64   `json:"bound"`
	Pass    bool      `json:"pass"`
}

// report collects the samples of a run.
type report struct {
	machine map[string]any
	section string
	round   int
	samples []sample
	notes   map[string][]string // by section
}

func newReport(postgresVersion string) *report {
	return &report{notes: map[string][]string{}, machine: map[string]any{
		"cpus": runtime.NumCPU(), "go": runtime.Version(), "postgres": postgresVersion, "load": loadAverage(),
		"started_at": time.Now().UTC().Format(time.RFC3339),
	}}
}

// loadAverage is the machine's over the last minute; what is above 0 before we
// begin is other people's.
func loadAverage() string {
	text, _ := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(text), " ")
	return first
}

func (r *report) begin(s section, round int) { r.section, r.round = s.name, round }

func (r *report) add(contestant, metric string, value float64) {
	r.samples = append(r.samples, sample{r.section, r.round, contestant, metric, value})
}

// note adds a line below the section's table.
func (r *report) note(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	if !slices.Contains(r.notes[r.section], line) {
		r.notes[r.section] = append(r.notes[r.section], line)
	}
}

// values returns what was measured of a series, by round.
func (r *report) values(section string, s series) map[int]float64 {
	values := map[int]float64{}
	for _, x := range r.samples {
		if x.Section == section && x.Contestant == s.contestant && x.Metric == s.metric {
			values[x.Round] = x.Value
		}
	}
	return values
}

func (r *report) judge(s section) []verdict {
	var verdicts []verdict
	for _, g := range s.goals {
		ours, other := r.values(s.name, g.ours), r.values(s.name, g.other)
		v := verdict{Section: s.name, Goal: g.what, Ours: median(list(ours)), AtLeast: g.atLeast, Bound: g.bound}
		v.Reached = v.Ours
		if g.other != (series{}) {
			v.Other = median(list(other))
			for _, round := range slices.Sorted(maps.Keys(ours)) {
				if base := other[round]; base != 0 {
					v.Ratios = append(v.Ratios, ours[round]/base)
				}
			}
			v.Reached = median(v.Ratios)
		}
		measured := len(ours) > 0 && (g.other == series{} || len(v.Ratios) > 0)
		if v.AtLeast {
			v.Pass = measured && v.Reached >= v.Bound
		} else {
			v.Pass = measured && v.Reached <= v.Bound
		}
		verdicts = append(verdicts, v)
	}
	return verdicts
}

func (r *report) print(w io.Writer, sections []section) {
	fmt.Fprintf(w, "weir bench: %v CPUs, load %v before it began, %v, Postgres %v, %v\n",
		r.machine["cpus"], r.machine["load"], r.machine["go"], r.machine["postgres"], r.machine["started_at"])
	for _, s := range sections {
		fmt.Fprintf(w, "\n== %s: %s\n\n", s.name, s.title)
		r.printSamples(w, s)
		for _, note := range r.notes[s.name] {
			fmt.Fprintln(w, note)
		}
		fmt.Fprintln(w)
		r.printGoals(w, s)
	}
}

// printSamples writes a line for each contestant and a column for each metric,
// both in the order in which they were first measured.
func (r *report) printSamples(w io.Writer, s section) {
	var contestants, metrics []string
	for _, x := range r.samples {
		if x.Section != s.name {
			continue
		}
		if !slices.Contains(contestants, x.Contestant) {
			contestants = append(contestants, x.Contestant)
		}
		if !slices.Contains(metrics, x.Metric) {
			metrics = append(metrics, x.Metric)
		}
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\t"+strings.Join(metrics, "\t"))
	for _, c := range contestants {
		cells := []string{c}
		for _, m := range metrics {
			cells = append(cells, cell(list(r.values(s.name, series{c, m}))))
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	t.Flush()
}

// cell is the median of the rounds, with their range when there are several.
func cell(values []float64) string {
	switch len(values) {
	case 0:
		return "-"
	case 1:
		return number(values[0])
	}
	return fmt.Sprintf("%s [%s-%s]", number(median(values)), number(slices.Min(values)), number(slices.Max(values)))
}

func (r *report) printGoals(w io.Writer, s section) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "goal\tours\tcomparator\tratio [rounds]\ttarget\t")
	for _, v := range r.judge(s) {
		other, ratio := "-", "-"
		if len(v.Ratios) > 0 {
			rounds := make([]string, len(v.Ratios))
			for i, x := range v.Ratios {
				rounds[i] = number(x)
			}
			other, ratio = number(v.Other), number(v.Reached)+" ["+strings.Join(rounds, " ")+"]"
		}
		sense, result := "<=", "MISS"
		if v.AtLeast {
			sense = ">="
		}
		if v.Pass {
			result = "PASS"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s %s\t%s\n", v.Goal, number(v.Ours), other, ratio, sense, number(v.Bound), result)
	}
	t.Flush()
}

func (r *report) writeJSON(name string, sections []section) error {
	var verdicts []verdict
	for _, s := range sections {
		verdicts = append(verdicts, r.judge(s)...)
	}
	text, err := json.MarshalIndent(map[string]any{
		"machine": r.machine, "goals": verdicts, "samples": r.samples, "notes": r.notes,
	}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(text, '\n'), 0o644)
}

func list(values map[int]float64) []float64 { return slices.Collect(maps.Values(values)) }

func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(values))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// quantile is the smallest value that the share q of them does not pass.
func quantile[T cmp.Ordered](sorted []T, q float64) T {
	var zero T
	if len(sorted) == 0 {
		return zero
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// number writes three digits that matter, or the whole of a large number.
func number(v float64) string {
	a := v
	if a < 0 {
		a = -a
	}
	switch {
	case v == float64(int64(v)) || a >= 100:
		return thousands(strconv.FormatFloat(v, 'f', 0, 64))
	case a >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case a >= 1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}

func thousands(digits string) string {
	sign := ""
	if strings.HasPrefix(digits, "-") {
		sign, digits = "-", digits[1:]
	}
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return sign + digits
}
