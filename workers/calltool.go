package workers

import (
	"context"

	"github.com/weir-run/weir/workers/tool"
)

// callTool makes a call that leaves the process. A tool that the agent no
// longer has cannot be called: its name came from a stored step.
func (w *Worker) callTool(ctx context.Context, a *agent, c tool.Call) tool.Result {
	t, ok := a.catalogue.Lookup(c.Tool)
	if !ok {
		return tool.Result{Err: &tool.Failure{Kind: tool.UnknownTool, Message: "the agent has no such tool"}}
	}
	return w.tools.Run(ctx, t, c)
}
