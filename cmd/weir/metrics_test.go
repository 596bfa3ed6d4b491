package main

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"
)

// The budget of metrics. What is not bounded by the program itself, as tenants,
// sessions, users, runs and agents are not, is no label.
var metricLabels = []string{"route", "method", "code", "kind", "state", "queue", "version", "quantile", "le"}

const metricSeries = 120 // of one family; weir_runs has one for each kind and state

// TestMetricsStayFew has a fleet do work of every kind and asks what it measures.
func TestMetricsStayFew(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	edge, c := f.api()
	worker := f.worker("--listen", "127.0.0.1:0")
	tool := newTestTool(t, nil)
	tool.agent(t, c, "counter", "idempotent")
	var runs []string
	for i := range 30 {
		text := "hello"
		switch i % 3 {
		case 1:
			text = "!error no such model"
		case 2:
			text = script(2)
		}
		runs = append(runs, accept(t, c, "counter", fmt.Sprint("session-", i), text))
	}
	for i := range 150 { // of somebody who looks for holes
		get(t, fmt.Sprintf("%s/admin/%d", edge.ready.API, i))
		req, err := http.NewRequestWithContext(limited(t), fmt.Sprint("M", i), edge.ready.API+"/rpc", nil)
		require.NoError(t, err)
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		get(t, fmt.Sprintf("%s/tasks/name/%d", edge.ready.API, i))
	}
	for _, id := range runs {
		await(t, c, id, ended)
	}
	for role, url := range map[string]string{"api": edge.ready.API, "worker": worker.ready.Listen} {
		status, text := get(t, url+"/metrics")
		require.Equal(t, http.StatusOK, status)
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err := parser.TextToMetricFamilies(strings.NewReader(text))
		require.NoError(t, err)
		require.Contains(t, families, "weir_runs")
		for name, family := range families {
			if n := len(family.Metric); n > metricSeries {
				t.Errorf("%s: %s has %d series, more than %d", role, name, n, metricSeries)
			}
			for _, m := range family.Metric {
				for _, label := range m.Label {
					if !slices.Contains(metricLabels, label.GetName()) {
						t.Errorf("%s: %s has a label %s=%q; is it bounded?", role, name, label.GetName(), label.GetValue())
					}
				}
			}
		}
		for _, id := range runs {
			require.NotContains(t, text, strings.TrimPrefix(id, "run_"))
		}
		require.NotContains(t, text, "session-")
	}
}
