package main

import (
	"encoding/json"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/client"
	"github.com/weir-run/weir/client/load"
)

func TestLoadFlags(t *testing.T) {
	t.Parallel()
	resolve := func(args ...string) (load.Config, error) {
		var l loadFlags
		cmd := newLoad()
		cmd.ResetFlags()
		cmd.Flags().String("token", "", "")
		l.define(cmd)
		require.NoError(t, cmd.ParseFlags(args))
		err := l.resolve(cmd, &remote{Client: client.New(client.Config{Token: "wt_own"})})
		return l.config, err
	}
	t.Run("Defaults", func(t *testing.T) {
		t.Parallel()
		c, err := resolve()
		require.NoError(t, err)
		require.Equal(t, load.Config{
			URL: client.DefaultURL, Tenants: []load.Tenant{{Name: "token", Token: "wt_own", Weight: 1}}, Mode: load.Execute,
			Messages: []string{"hello"}, Users: load.Constant(10), Duration: 10 * time.Second, Timeout: time.Minute,
			Spacing: load.Poisson, MaxInFlight: load.DefaultMaxInFlight, ProgressEvery: time.Second,
		}, c)
	})
	t.Run("Open", func(t *testing.T) {
		t.Parallel()
		c, err := resolve("-r", "0.5", "--arrivals", "even", "-n", "7", "--accept-only", "--tenant", "a=wt_a:9", "--tenant", "b=wt_b")
		require.NoError(t, err)
		require.Equal(t, load.Constant(0.5), c.Rate)
		require.Nil(t, c.Users)
		require.Zero(t, c.Duration, "the turns end it")
		require.Equal(t, load.Accept, c.Mode)
		require.Equal(t, []load.Tenant{{Name: "a", Token: "wt_a", Weight: 9}, {Name: "b", Token: "wt_b", Weight: 1}}, c.Tenants)
	})
	t.Run("Ramps", func(t *testing.T) {
		t.Parallel()
		c, err := resolve("--ramp", "0:100,30s:500")
		require.NoError(t, err)
		require.Equal(t, load.Ramp{{Level: 100}, {At: 30 * time.Second, Level: 500}}, c.Rate)
		require.Equal(t, 30*time.Second, c.Duration)
		c, err = resolve("--ramp", "0:1,30s:50", "--ramp-of", "concurrency", "-d", "1m")
		require.NoError(t, err)
		require.Nil(t, c.Rate)
		require.Equal(t, load.Ramp{{Level: 1}, {At: 30 * time.Second, Level: 50}}, c.Users)
		require.Equal(t, time.Minute, c.Duration)
	})
	t.Run("Steps", func(t *testing.T) {
		t.Parallel()
		c, err := resolve("--steps", "3", "--tool", "count", "-m", "!sleep 1ms", "-m", "x")
		require.NoError(t, err)
		lines := "!tool count {\"n\":1}\n!tool count {\"n\":2}\n"
		require.Equal(t, []string{lines + "!sleep 1ms", lines + "x"}, c.Messages)
	})
	t.Run("Refused", func(t *testing.T) {
		t.Parallel()
		for _, args := range []string{
			"--rate 1 --concurrency 1", "--ramp 0:1,1s:2 --rate 1", "--accept-only --split", "--token wt_x --tenant a=wt_a",
			"--rate 0", "--rate -1", "--concurrency 0", "--ramp 0:5", "--ramp 5", "--ramp 0:1,1s:2 --ramp-of users",
			"--arrivals odd --rate 1", "--max-in-flight 0", "--max-errors -1", "--steps -1", "-d -1s", "--timeout 0s",
			"--tenant a", "--tenant =wt_a", "--tenant a=", "--tenant a=wt_a:0", "--tenant a=wt_a:x", "--tenant a=wt_a --tenant a=wt_b",
		} {
			_, err := resolve(strings.Fields(args)...)
			require.Equal(t, exitUsage, exitCode(err), "%s: %v", args, err)
			require.NotContains(t, err.Error(), "wt_", "a token is a secret")
		}
	})
}

func TestSpan(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		0: "0.00ms", 1234 * time.Nanosecond: "0.00ms", 123456 * time.Nanosecond: "0.12ms", 1234567 * time.Nanosecond: "1.23ms",
		12345678 * time.Nanosecond: "12.3ms", 123456789 * time.Nanosecond: "123ms", 1234567890 * time.Nanosecond: "1.23s", 90 * time.Second: "90.0s",
	} {
		require.Equal(t, want, span(d))
	}
}

func TestLoad(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	other := weir(t, "", "tokens", "create", "--database-url", f.url, "--id", "other", "--tenant", "other", "--scopes", "rpc")
	require.Zero(t, other.code, other.stderr)
	otherToken := strings.TrimSpace(other.stdout)
	api, c := f.api()
	f.worker()
	put := func(t *testing.T, args ...string) result {
		t.Helper()
		return weir(t, "", append([]string{"load", "--url", api.ready.API}, args...)...)
	}
	measured := func(t *testing.T, args ...string) (load.Result, result) {
		t.Helper()
		r := put(t, append(args, "-o", "json")...)
		var out load.Result
		require.NoError(t, json.Unmarshal([]byte(r.stdout), &out), r.stdout+r.stderr)
		return out, r
	}
	t.Run("Measures", func(t *testing.T) {
		t.Run("ClosedLoop", func(t *testing.T) {
			t.Parallel()
			out, r := measured(t, "--token", f.token, "-c", "4", "-n", "40", "--sessions", "5", "-m", "!sleep 1ms", "-m", "hello")
			require.Zero(t, r.code, r.stderr)
			require.Equal(t, "closed", out.Loop)
			require.EqualValues(t, 40, out.Total.OK)
			require.EqualValues(t, 40, out.Total.LatencyMs["total"].Count)
			require.Positive(t, out.Total.LatencyMs["total"].P999)
			require.Positive(t, out.Total.OKPerSecond)
		})
		t.Run("OpenLoop", func(t *testing.T) {
			t.Parallel()
			out, r := measured(t, "--token", f.token, "-r", "50", "--arrivals", "even", "-d", "1s", "--warmup", "200ms", "--accept-only")
			require.Zero(t, r.code, r.stderr)
			require.Equal(t, "open", out.Loop)
			require.EqualValues(t, 50, out.Total.OK)
			require.EqualValues(t, 50, out.Total.LatencyMs["accept"].Count)
			require.InDelta(t, 1000, out.WindowMs, 0)
			require.NotNil(t, out.LatenessMs)
		})
		t.Run("PhasesAndSteps", func(t *testing.T) {
			t.Parallel()
			out, r := measured(t, "--token", otherToken, "-c", "1", "-n", "3", "--split", "--steps", "3", "--sessions", "1")
			require.Zero(t, r.code, r.stderr)
			for _, phase := range []string{"accept", "queued", "running", "total"} {
				require.EqualValues(t, 3, out.Total.LatencyMs[phase].Count, phase)
			}
		})
		t.Run("TwoTenants", func(t *testing.T) {
			t.Parallel()
			args := []string{"--tenant", "big=" + f.token + ":3", "--tenant", "small=" + otherToken, "-n", "40", "-m", "hello", "--agent", "default"}
			out, r := measured(t, args...)
			require.Zero(t, r.code, r.stderr)
			require.Len(t, out.Tenants, 2)
			require.Equal(t, "big", out.Tenants[0].Name)
			require.EqualValues(t, 30, out.Tenants[0].OK)
			require.EqualValues(t, 10, out.Tenants[1].OK)
			require.EqualValues(t, 10, out.Tenants[1].LatencyMs["total"].Count)

			r = put(t, args...)
			require.Zero(t, r.code, r.stderr)
			for _, text := range []string{"agent.execute: closed loop, 10 users", "TENANT", "P99.9", "\nall ", "\nbig ", "\nsmall "} {
				require.Contains(t, r.stdout, text)
			}
		})
		t.Run("Errors", func(t *testing.T) {
			t.Parallel()
			args := []string{"--token", f.token, "-n", "10", "-m", "!error broken", "-m", "hello"}
			out, r := measured(t, args...)
			require.Equal(t, exitFailed, r.code)
			require.Contains(t, r.stderr, "5 turns failed")
			require.EqualValues(t, 5, out.Total.OK)
			require.Len(t, out.Total.Errors, 1)
			require.Equal(t, "-32015", out.Total.Errors[0].Code)
			require.Contains(t, out.Total.Errors[0].Message, "broken")
			r = put(t, append(args, "--max-errors", "5")...)
			require.Zero(t, r.code, r.stderr)
			require.Contains(t, r.stdout, "-32015")
		})
		t.Run("RejectionsAreNoErrors", func(t *testing.T) {
			t.Parallel()
			// One session holds one turn that goes on and twenty that wait.
			out, r := measured(t, "--token", f.token, "-n", "40", "--sessions", "1", "--accept-only", "-m", "!sleep 10s", "-c", "1")
			require.Zero(t, r.code, r.stderr)
			require.GreaterOrEqual(t, out.Total.Rejected, int64(10))
			require.Equal(t, "-32010", out.Total.Errors[0].Code)
			require.True(t, out.Total.Errors[0].Rejected)
		})
		t.Run("ExitsAsPromised", func(t *testing.T) {
			t.Parallel()
			require.Equal(t, exitUsage, put(t, "--rate", "fast").code)
			require.Equal(t, exitUsage, put(t, "--rate", "0").code)
			require.Equal(t, exitDenied, put(t, "--token", "wt_wrong").code)
			r := put(t, "--tenant", "a="+f.token, "--tenant", "b=wt_wrong")
			require.Equal(t, exitDenied, r.code)
			require.Contains(t, r.stderr, "tenant b")
			require.Equal(t, exitFailed, weir(t, "", "load", "--url", "http://127.0.0.1:1").code)
		})
		t.Run("Interrupt", func(t *testing.T) {
			t.Parallel()
			running := func() int {
				runs, err := c.Runs(limited(t), client.RunListParams{AgentID: "slow", State: "running"})
				require.NoError(t, err)
				return len(runs.Runs)
			}
			_, err := c.CreateAgent(limited(t), json.RawMessage(`{"name": "slow"}`), "slow")
			require.NoError(t, err)
			start := func(message string) *role {
				p := launch(t, "", "load", "--url", api.ready.API, "--token", f.token, "-a", "slow", "-c", "2", "-d", "1h", "-m", message, "-o", "ndjson")
				require.Eventually(t, func() bool { return running() == 2 }, stepLimit, 20*time.Millisecond)
				return p
			}
			read := func(p *role) (out load.Result) {
				select {
				case line := <-p.lines:
					require.NoError(t, json.Unmarshal([]byte(line), &out), line)
				case <-time.After(stepLimit):
					t.Fatal("no result")
				}
				return out
			}
			p := start("!sleep 2s")
			p.signal(syscall.SIGINT)
			out := read(p)
			require.Zero(t, p.exit(), p.log)
			require.True(t, out.Interrupted)
			require.Equal(t, out.Total.Sent, out.Total.OK)
			require.Zero(t, out.Total.Abandoned)

			p = start("!stall")
			p.signal(syscall.SIGINT)
			require.Eventually(t, func() bool { return strings.Contains(p.log.String(), "no more is sent") }, stepLimit, 10*time.Millisecond)
			p.signal(syscall.SIGINT)
			out = read(p)
			require.Equal(t, exitFailed, p.exit())
			require.EqualValues(t, 2, out.Total.Abandoned)
		})
	})
}
