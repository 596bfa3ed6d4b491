package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	naiveAccept = "gin + River InsertTx"
	handAccept  = "gin + group commit by hand"
)

var acceptSection = section{
	name: "accept", title: "JSON-RPC request over HTTP -> run and job committed -> answer", run: (*bench).runAccept,
	goals: []goal{
		atLeast(4, "rate at 64 connections, of naive", series{"weir api", "c64 req/s"}, series{naiveAccept, "c64 req/s"}),
		atLeast(0.6, "rate at 64 connections, of hand-built", series{"weir api", "c64 req/s"}, series{handAccept, "c64 req/s"}),
		atMost(0.5, "p99 at 64 connections, of naive", series{"weir api", "c64 p99 ms"}, series{naiveAccept, "c64 p99 ms"}),
		atLeast(1.2, "rate at 8 connections, of naive", series{"weir api", "c8 req/s"}, series{naiveAccept, "c8 req/s"}),
	},
}

func (b *bench) runAccept(ctx context.Context, round int) error {
	for _, contestant := range []struct {
		name  string
		serve func(context.Context) (*database, *process, load, error)
	}{
		{"weir api", b.serveWeir},
		{naiveAccept, func(ctx context.Context) (*database, *process, load, error) { return b.serveHand(ctx, "naive") }},
		{handAccept, func(ctx context.Context) (*database, *process, load, error) { return b.serveHand(ctx, "hand") }},
	} {
		if err := b.acceptOf(ctx, contestant.name, contestant.serve); err != nil {
			return fmt.Errorf("%s: %w", contestant.name, err)
		}
	}
	return nil
}

func (b *bench) acceptOf(ctx context.Context, name string, serve func(context.Context) (*database, *process, load, error)) error {
	d, p, l, err := serve(ctx)
	if err != nil {
		return err
	}
	defer d.drop()
	defer p.kill()
	for i, conns := range []int{64, 8} {
		l.conns = conns
		base := uint64(i+1) << 48
		if _, err := l.run(ctx, base|1<<40, b.size.acceptWarmUp); err != nil {
			return err
		}
		m := b.meter(p)
		r, err := l.run(ctx, base, b.size.acceptFor)
		if err != nil {
			return err
		}
		wall, own, pg := m.stop()
		answers := r.rate * wall.Seconds()
		column := func(metric string) string { return fmt.Sprintf("c%d %s", conns, metric) }
		b.out.add(name, column("req/s"), r.rate)
		b.out.add(name, column("p50 ms"), r.p50)
		b.out.add(name, column("p99 ms"), r.p99)
		b.out.add(name, column("us CPU own"), own/answers*1e6)
		b.out.add(name, column("us CPU pg"), pg/answers*1e6)
	}
	return nil
}

func (b *bench) serveWeir(ctx context.Context) (*database, *process, load, error) {
	d, err := b.weirDatabase(ctx)
	if err != nil {
		return nil, nil, load{}, err
	}
	token, err := b.weirToken(ctx, d)
	if err == nil {
		var p *process
		var ready weirReady
		if p, ready, err = b.startWeir(ctx, d, "api", "--listen", "127.0.0.1:0"); err == nil {
			return d, p, load{addr: ready.addr(), token: token}, nil
		}
	}
	d.drop()
	return nil, nil, load{}, err
}

func (b *bench) serveHand(ctx context.Context, kind string) (*database, *process, load, error) {
	d, err := b.riverDatabase(ctx)
	if err != nil {
		return nil, nil, load{}, err
	}
	p, addr, err := b.spawnChild(ctx, "accept", childConfig{URL: d.url, Kind: kind})
	if err != nil {
		d.drop()
		return nil, nil, load{}, err
	}
	return d, p, load{addr: addr}, nil
}

// handRequest is as much of an agent.request as the hand-built servers read.
type handRequest struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params struct {
		SessionID string `json:"sessionId"`
		Content   struct {
			Text string `json:"text"`
		} `json:"content"`
	} `json:"params"`
}

// acceptChild serves the accept that a user would write first (naive), or the
// one whose commits are shared (hand): a run and its job, committed before the
// answer.
func acceptChild(ctx context.Context, c childConfig, _ *bufio.Reader) error {
	pool, err := openChildPool(ctx, c.URL, 16)
	if err != nil {
		return err
	}
	defer pool.Close()
	var accept func(ctx context.Context, payload string) (int64, error)
	if c.Kind == "naive" {
		accept, err = acceptNaive(pool)
	} else {
		accept = acceptGrouped(pool)
	}
	if err != nil {
		return err
	}
	gin.SetMode(gin.ReleaseMode)
	engine := gin.New()
	engine.POST("/rpc", func(c *gin.Context) {
		var r handRequest
		if err := c.ShouldBindJSON(&r); err != nil {
			c.JSON(http.StatusBadRequest, gin.H{"error": err.Error()})
			return
		}
		payload, err := json.Marshal(r.Params)
		if err == nil {
			var run int64
			if run, err = accept(c.Request.Context(), string(payload)); err == nil {
				c.JSON(http.StatusOK, gin.H{"jsonrpc": "2.0", "id": r.ID, "result": gin.H{
					"phase": "thinking", "status": "accepted", "sessionId": r.Params.SessionID, "runId": run,
				}})
				return
			}
		}
		c.JSON(http.StatusInternalServerError, gin.H{"error": err.Error()})
	})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println("ready", listener.Addr())
	return (&http.Server{Handler: engine, ReadHeaderTimeout: time.Minute}).Serve(listener)
}

func acceptNaive(pool *pgxpool.Pool) (func(context.Context, string) (int64, error), error) {
	client, err := newInserter(pool, defaultCooldown)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, payload string) (int64, error) {
		return acceptWithRiver(ctx, pool, client, payload)
	}, nil
}

// acceptWithRiver commits a run and its job, as a user of River would.
func acceptWithRiver(ctx context.Context, pool *pgxpool.Pool, client *riverClient, payload string) (run int64, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, `INSERT INTO run (payload) VALUES ($1) RETURNING id`, payload).Scan(&run); err != nil {
			return err
		}
		_, err := client.InsertTx(ctx, tx, handTurn{Run: run}, nil)
		return err
	})
	return run, err
}

type handAccepted struct {
	id      int64
	payload string
}

// acceptGrouped writes the rows of many requests with two statements, and
// notifies once for all.
func acceptGrouped(pool *pgxpool.Pool) func(context.Context, string) (int64, error) {
	const writers = 2
	var last atomic.Int64
	g := newGroup(writers, func(ctx context.Context, items []handAccepted) error {
		runs, payloads := make([]int64, len(items)), make([]string, len(items))
		for i, it := range items {
			runs[i], payloads[i] = it.id, it.payload
		}
		var batch pgx.Batch
		batch.Queue(`INSERT INTO run (id, payload) OVERRIDING SYSTEM VALUE SELECT * FROM unnest($1::bigint[], $2::jsonb[])`, runs, payloads)
		batch.Queue(`INSERT INTO river_job (args, kind, max_attempts) SELECT jsonb_build_object('run', id), 'turn', 25 FROM unnest($1::bigint[]) id`, runs)
		batch.Queue(`SELECT pg_notify(current_schema() || '.river_insert', '{"queue":"default"}')`)
		return pool.SendBatch(ctx, &batch).Close()
	})
	return func(_ context.Context, payload string) (int64, error) {
		id := last.Add(1)
		return id, g.do(handAccepted{id, payload})
	}
}
