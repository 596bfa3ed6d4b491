package jobs

import (
	"encoding/json"
	"strconv"
	"testing"

	"github.com/weir-run/weir/db"
)

// Both measure one caller alone, whose every change is a unit, so that the
// allocations of one can be told.

// BenchmarkAccept accepts a turn in a new session.
func BenchmarkAccept(b *testing.B) {
	f := setup(b)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		name := strconv.Itoa(i)
		_, err := f.runs.Accept(f.ctx, AcceptParams{
			TenantID: "default", Session: f.session(name), Fresh: true, Terms: terms, Input: json.RawMessage(`{"text":"hi"}`),
		})
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkAdvance commits steps of one claimed turn.
func BenchmarkAdvance(b *testing.B) {
	f := setup(b)
	run, err := f.runs.Claim(f.ctx, f.worker(), f.accept("s").RunID)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for i := int32(0); b.Loop(); i++ {
		_, err := f.runs.Advance(f.ctx, run, Advance{Steps: []Step{{
			Seq: i, Kind: db.StepKindTool, Status: db.StepStatusDone, CallID: "c", Name: "t", Output: json.RawMessage(`{}`),
		}}})
		if err != nil {
			b.Fatal(err)
		}
	}
}
