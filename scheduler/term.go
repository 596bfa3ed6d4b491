package scheduler

import (
	"context"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-run/weir/db"
)

const (
	termLasts = 3 * time.Second
	termRenew = time.Second
)

// term is a duty of a process that reaches Postgres through a pooler alone,
// where no lock outlives its transaction: a row says who has it and until when.
// The duty's lock is looked at too, which a process with a session of its own
// holds; such a one goes first.
type term struct {
	pool    *pgxpool.Pool
	queries *db.Queries
	name    string
	lock    int64
	holder  uuid.UUID
	asked   time.Time // when the term was last renewed
	ends    time.Time // by this process's monotonic clock, from before it asked: this side gives up first
}

func newTerm(pool *pgxpool.Pool, name string, lock int64) *term {
	return &term{pool: pool, queries: db.New(), name: name, lock: lock, holder: uuid.Must(uuid.NewV7())}
}

// leads says whether this process has the duty. It asks the database when it is
// time to renew, and always while somebody else has it. Beside an error the
// answer is still right.
func (t *term) leads(ctx context.Context) (bool, error) {
	began := time.Now()
	if began.Before(t.ends) && began.Sub(t.asked) < termRenew {
		return true, nil
	}
	ctx, cancel := context.WithTimeout(ctx, termLasts)
	defer cancel()
	n, err := t.queries.DutyTake(ctx, t.pool, db.DutyTakeParams{Name: t.name, Holder: &t.holder, Seconds: termLasts.Seconds(), LockKey: t.lock})
	switch {
	case err != nil:
	case n == 0:
		t.ends = time.Time{}
	default:
		t.asked, t.ends = began, began.Add(termLasts)
	}
	return time.Now().Before(t.ends), err
}

// leave gives the duty up, so that another may take it at once.
func (t *term) leave(ctx context.Context) {
	if t.ends.IsZero() {
		return
	}
	t.ends = time.Time{}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = t.queries.DutyLeave(ctx, t.pool, db.DutyLeaveParams{Name: t.name, Holder: &t.holder}) // else it ends by itself
}
