package db

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Open makes a pool whose connections know the types of our queries. It does
// not connect. configure may be nil.
func Open(ctx context.Context, url string, configure func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	c, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("database url: %w", err)
	}
	c.AfterConnect = RegisterTypes
	// A plan that was made while a table was small scans it for ever, if it is
	// kept. To plan anew costs some 50 us.
	c.ConnConfig.RuntimeParams["plan_cache_mode"] = "force_custom_plan"
	if configure != nil {
		configure(c)
	}
	return pgxpool.NewWithConfig(ctx, c)
}

// OpenHot makes the pool of a committer. Its statements find rows by key, many
// at once; the planner, which keeps the plan it made when a table was small or
// without statistics, is told to use the indexes whatever it believes.
func OpenHot(ctx context.Context, url string, configure func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	return Open(ctx, url, func(c *pgxpool.Config) {
		hot(c.ConnConfig)
		if configure != nil {
			configure(c)
		}
	})
}

// OpenPooled makes a pool that works through a pooler in transaction mode, where
// each transaction may have another backend: nothing is prepared, and nothing
// set that such a pooler refuses or another client would find. What OpenHot's
// connections keep, Pipeline.Hot sets for one transaction.
func OpenPooled(ctx context.Context, url string, configure func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	c, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("database url: %w", err)
	}
	c.AfterConnect = RegisterTypes
	c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	if configure != nil {
		configure(c)
	}
	return pgxpool.NewWithConfig(ctx, c)
}

// Pooled says whether url leads through a pooler: whoever greets there is not
// the backend that carries the statements out. A pooler in session mode counts
// too, since nothing tells the two apart for certain.
func Pooled(ctx context.Context, url string) (bool, error) {
	c, err := pgx.ParseConfig(url)
	if err != nil {
		return false, fmt.Errorf("database url: %w", err)
	}
	c.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(ctx, c)
	if err != nil {
		return false, fmt.Errorf("look for a pooler: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var backend uint32
	if err := conn.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&backend); err != nil {
		return false, fmt.Errorf("look for a pooler: %w", err)
	}
	return backend != conn.PgConn().PID(), nil
}

// HotConfig is OpenHot for a connection of its own; RegisterTypes it.
func HotConfig(c *pgx.ConnConfig) *pgx.ConnConfig {
	c = c.Copy()
	hot(c)
	return c
}

func hot(c *pgx.ConnConfig) {
	for _, setting := range []string{"enable_seqscan", "enable_hashjoin", "enable_mergejoin", "jit"} {
		c.RuntimeParams[setting] = "off"
	}
	c.RuntimeParams["plan_cache_mode"] = "force_generic_plan"
	// A server whose client is gone without a word, or stands still, must not keep
	// its locks: others wait for the rows once they may take the client's runs,
	// which is a lease later. Between two statements of a unit lie milliseconds.
	c.RuntimeParams["idle_in_transaction_session_timeout"] = "5s"
	c.RuntimeParams["tcp_user_timeout"] = "30s"
}

// hotLocal is what of that makes sense for a single transaction.
const hotLocal = `SELECT set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),
	set_config('enable_mergejoin', 'off', true), set_config('jit', 'off', true), set_config('idle_in_transaction_session_timeout', '5s', true)`

// RegisterTypes teaches conn to encode the slices of the unit's statements
// without a look at each element's type, and UUIDs without their text form.
// It is a pgxpool AfterConnect hook. pgx's generic path took more than half of
// a busy process's time.
func RegisterTypes(_ context.Context, conn *pgx.Conn) error {
	m := conn.TypeMap()
	register := func(name string, oid uint32, codec func(pgtype.Codec) pgtype.Codec) {
		t, _ := m.TypeForOID(oid)
		m.RegisterType(&pgtype.Type{Name: name, OID: oid, Codec: codec(t.Codec)})
	}
	register("uuid", pgtype.UUIDOID, func(c pgtype.Codec) pgtype.Codec { return uuidCodec{c} })
	register("_uuid", pgtype.UUIDArrayOID, slices(pgtype.UUIDOID, func(buf []byte, v uuid.UUID) []byte {
		return append(binary.BigEndian.AppendUint32(buf, 16), v[:]...)
	}))
	register("_text", pgtype.TextArrayOID, slices(pgtype.TextOID, func(buf []byte, v string) []byte {
		return append(binary.BigEndian.AppendUint32(buf, uint32(len(v))), v...)
	}))
	register("_int4", pgtype.Int4ArrayOID, slices(pgtype.Int4OID, func(buf []byte, v int32) []byte {
		return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(buf, 4), uint32(v))
	}))
	register("_int8", pgtype.Int8ArrayOID, slices(pgtype.Int8OID, func(buf []byte, v int64) []byte {
		return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(buf, 8), uint64(v))
	}))
	register("_timestamptz", pgtype.TimestamptzArrayOID, slices(pgtype.TimestamptzOID, func(buf []byte, v time.Time) []byte {
		return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(buf, 8), uint64(v.UnixMicro()-postgresEpochMicros))
	}))
	return nil
}

const postgresEpochMicros = 946684800 * 1_000_000 // 2000-01-01, where Postgres counts from

// sliceCodec encodes []T as a one-dimensional array in binary; everything else
// goes the codec's own way.
type sliceCodec[T any] struct {
	pgtype.Codec
	plan slicePlan[T]
}

func slices[T any](element uint32, add func([]byte, T) []byte) func(pgtype.Codec) pgtype.Codec {
	return func(c pgtype.Codec) pgtype.Codec { return sliceCodec[T]{c, slicePlan[T]{element, add}} }
}

func (c sliceCodec[T]) PlanEncode(m *pgtype.Map, oid uint32, format int16, value any) pgtype.EncodePlan {
	if _, ok := value.([]T); ok && format == pgtype.BinaryFormatCode {
		return c.plan
	}
	return c.Codec.PlanEncode(m, oid, format, value)
}

type slicePlan[T any] struct {
	element uint32
	add     func([]byte, T) []byte
}

func (p slicePlan[T]) Encode(value any, buf []byte) ([]byte, error) {
	v := value.([]T)
	if len(v) > math.MaxInt32 {
		return nil, fmt.Errorf("array of %d elements", len(v))
	}
	if len(v) == 0 {
		buf = binary.BigEndian.AppendUint32(buf, 0) // dimensions
		buf = binary.BigEndian.AppendUint32(buf, 0)
		return binary.BigEndian.AppendUint32(buf, p.element), nil
	}
	buf = binary.BigEndian.AppendUint32(buf, 1) // dimensions
	buf = binary.BigEndian.AppendUint32(buf, 0) // no NULLs
	buf = binary.BigEndian.AppendUint32(buf, p.element)
	buf = binary.BigEndian.AppendUint32(buf, uint32(len(v)))
	buf = binary.BigEndian.AppendUint32(buf, 1) // lower bound
	for _, e := range v {
		buf = p.add(buf, e)
	}
	return buf, nil
}

// uuidCodec moves google/uuid's UUIDs in binary.
type uuidCodec struct{ pgtype.Codec }

func (c uuidCodec) PlanEncode(m *pgtype.Map, oid uint32, format int16, value any) pgtype.EncodePlan {
	if _, ok := value.(uuid.UUID); ok && format == pgtype.BinaryFormatCode {
		return uuidPlan{}
	}
	return c.Codec.PlanEncode(m, oid, format, value)
}

func (c uuidCodec) PlanScan(m *pgtype.Map, oid uint32, format int16, target any) pgtype.ScanPlan {
	if _, ok := target.(*uuid.UUID); ok && format == pgtype.BinaryFormatCode {
		return uuidPlan{}
	}
	return c.Codec.PlanScan(m, oid, format, target)
}

type uuidPlan struct{}

func (uuidPlan) Encode(value any, buf []byte) ([]byte, error) {
	id := value.(uuid.UUID)
	return append(buf, id[:]...), nil
}

func (uuidPlan) Scan(src []byte, target any) error {
	if len(src) != 16 {
		return fmt.Errorf("uuid of %d bytes", len(src))
	}
	copy(target.(*uuid.UUID)[:], src)
	return nil
}
