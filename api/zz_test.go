package api

import (
	"github.com/stretchr/testify/require"
	"os"
	"strings"
	"testing"
	"time"
)

func TestZZ(t *testing.T) {
	f := setup(t)
	ex := func(sql string) {
		b := time.Now()
		_, err := f.pool.Exec(f.ctx, sql)
		require.NoError(t, err)
		t.Log(time.Since(b), sql[:30])
	}
	ex(`INSERT INTO session (tenant_id,id,conversation_ref,channel_type,scope,agent,external_id,event_seq,head_run_id,queued) SELECT 'default', ('00000000-0000-7000-8000-'||lpad(to_hex(g),12,'0'))::uuid, 'cv_'||g, 'rpc','[]','default','s'||g,1, ('00000000-0000-7000-8000-'||lpad(to_hex(g),12,'0'))::uuid, case when g%10=0 then 1 else 0 end FROM generate_series(1,200000) g`)
	ex(`INSERT INTO run (id,tenant_id,kind,state,queue,root_run_id,agent,agent_version,session_id,request_seq,in_lane,input,time_left_ms,finished_at) SELECT x,'default','turn',case when g%50=0 then 'failed' else 'completed' end::run_state,'turns',x,'default',1,('00000000-0000-7000-8000-'||lpad(to_hex(1+g%200000),12,'0'))::uuid,1,true,'{"text":"hello"}',1,now() FROM (SELECT g, ('00000000-0000-7000-8000-'||lpad(to_hex(g),12,'0'))::uuid AS x FROM generate_series(1,1000000) g) q`)
	ex(`INSERT INTO run (id,tenant_id,kind,state,queue,root_run_id,agent,agent_version,session_id,request_seq,in_lane,input,time_left_ms,admitted_at,nudged_at) SELECT x,'default','turn','queued','turns',x,'default',1,('00000000-0000-7000-8000-'||lpad(to_hex(1+g%200000),12,'0'))::uuid,1,true,'{"text":"hello"}',1,now(),now() FROM (SELECT g, ('00000000-0000-7000-8000-'||lpad(to_hex(g),12,'0'))::uuid AS x FROM generate_series(1000001,1300000) g) q`)
	q, _ := os.ReadFile("../db/queries/metrics.sql")
	conn, _ := f.pool.Acquire(f.ctx)
	defer conn.Release()
	conn.Exec(f.ctx, `SELECT set_config(s, 'off', false) FROM unnest('{enable_seqscan,enable_bitmapscan,enable_sort,jit}'::text[]) s`)
	for round := range 2 {
		for _, s := range strings.Split(string(q), "-- name: ")[1:] {
			s = s[strings.Index(s, "\n"):]
			for strings.HasPrefix(strings.TrimSpace(s), "--") {
				s = strings.TrimSpace(s)
				s = s[strings.Index(s, "\n"):]
			}
			s = strings.ReplaceAll(s, "@max_rows", "10000")
			s = strings.ReplaceAll(s, "@percent::float4", "0.9")
			rows, err := conn.Query(f.ctx, "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) "+strings.TrimSuffix(strings.TrimSpace(s), ";"))
			require.NoError(t, err)
			out := ""
			for rows.Next() {
				var l string
				rows.Scan(&l)
				out += l + "\n"
			}
			rows.Close()
			t.Log(round, "\n"+out)
		}
		ex("VACUUM ANALYZE                                ")
	}
}
