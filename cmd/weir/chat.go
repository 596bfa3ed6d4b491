package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/weir-run/weir/client"
)

const (
	completeWithin = 2 * time.Second
	// chatWait is how long one request waits for its turn. Then the same key
	// waits again: no proxy's limit cuts a long turn off, and an API that
	// restarted is asked anew.
	chatWait     = 20 * time.Second
	cancelWithin = 5 * time.Second
	maxMessage   = 256 << 10 // RC-10
)

// chat is a conversation from the command line.
type chat struct {
	client  *client.Client
	agent   string
	session string
	user    string
	timeout time.Duration
	stderr  io.Writer
	status  bool // stderr is a terminal: show what is going on
}

func newChat() *cobra.Command {
	var ch chat
	cmd := &cobra.Command{
		Use: "chat [TEXT]", Short: "Talks to an agent", Args: cobra.ArbitraryArgs,
		Long: `Sends TEXT to an agent and prints its answer. Without TEXT it reads the message
from a pipe, or opens a conversation on a terminal.

Every message carries an idempotency key, so that one which is sent again after a
restart of the API is answered once. The turn goes on whatever becomes of this
command.

Exits 6 when the turn failed, 7 when the session is busy, 5 after --timeout.`,
		Example: "  weir chat \"hello\"\n  weir chat -a researcher --session notes \"and now?\"\n  cat report.txt | weir chat\n  weir chat",
	}
	return remoteCommand(cmd, func(cmd *cobra.Command) {
		f := cmd.Flags()
		f.StringVarP(&ch.agent, "agent", "a", "", "agent to talk to (default: default)")
		f.StringVarP(&ch.session, "session", "s", "", "session to continue, or a name for a new one")
		f.StringVar(&ch.user, "user", "", "user to speak for")
		f.DurationVar(&ch.timeout, "timeout", 0, "how long to wait for an answer (default: as long as the turn takes)")
		_ = cmd.RegisterFlagCompletionFunc("agent", completeAgents)
	}, func(cmd *cobra.Command, r *remote, args []string) error {
		ch.client, ch.stderr = r.Client, cmd.ErrOrStderr()
		ch.status = isTerminal(cmd.ErrOrStderr()) && r.out.people()
		if ch.timeout < 0 {
			return usagef("--timeout must not be negative")
		}
		if len(args) == 0 && isTerminal(cmd.InOrStdin()) {
			if !r.out.people() {
				return usagef("a conversation has no --output; give TEXT, or pipe it in")
			}
			return ch.converse(cmd.Context(), cmd.InOrStdin().(*os.File), cmd.OutOrStdout())
		}
		message := strings.Join(args, " ")
		if len(args) == 0 || message == "-" {
			text, err := io.ReadAll(io.LimitReader(cmd.InOrStdin(), maxMessage+1))
			if err != nil {
				return fmt.Errorf("read the message: %w", err)
			}
			message = strings.TrimRight(string(text), "\r\n")
		}
		if strings.TrimSpace(message) == "" {
			return usagef("there is no message: give TEXT, or pipe it in")
		}
		if len(message) > maxMessage {
			return usagef("the message is longer than %d bytes", maxMessage)
		}
		if ch.session == "" {
			ch.session = newSessionID()
		}
		result, err := ch.turn(cmd.Context(), message)
		if err != nil {
			return err
		}
		v := struct {
			*client.ExecuteResult
			SessionID string `json:"sessionId"`
		}{result, ch.session}
		return r.out.one(cmd, v, func() { fmt.Fprintln(cmd.OutOrStdout(), answerText(cmd.OutOrStdout(), result.Response)) })
	})
}

func newSessionID() string { return "chat-" + uuid.NewString() }

// answerText keeps an agent from steering somebody's terminal; a file or a pipe
// gets the answer as it is.
func answerText(w io.Writer, answer string) string {
	if isTerminal(w) {
		return text(answer)
	}
	return answer
}

// turn sends one message and waits for the answer. An interrupt cancels the
// turn; a second one leaves it to itself.
func (ch *chat) turn(ctx context.Context, message string) (*client.ExecuteResult, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	defer signal.Stop(interrupts)
	go func() {
		select {
		case <-interrupts:
			ch.cancelTurn(ctx)
		case <-ctx.Done():
			return
		}
		select {
		case <-interrupts:
			cancel()
		case <-ctx.Done():
		}
	}()

	wait := chatWait
	if ch.timeout > 0 {
		wait = min(wait, ch.timeout)
	}
	p := client.ExecuteParams{
		Message: message, AgentID: ch.agent, SessionID: ch.session, UserID: ch.user,
		IdempotencyKey: uuid.NewString(), TimeoutMs: max(1, wait.Milliseconds()),
	}
	began := time.Now()
	for {
		result, err := ch.client.Execute(ctx, p)
		e, refused := errors.AsType[*client.Error](err)
		switch {
		case err == nil:
			return result, nil
		case refused && e.Code == client.CodeStillRunning:
			var still client.StillRunning
			_ = e.DecodeData(&still)
			if ch.timeout > 0 && time.Since(began) >= ch.timeout {
				return nil, fmt.Errorf("%w after %s; the turn goes on: weir runs watch %s", errTimeout, ch.timeout, still.RunID)
			}
			if ch.status {
				fmt.Fprintf(ch.stderr, "  … %s after %s (%s)\n", still.Phase, brief(time.Since(began)), still.RunID)
			}
		case refused && e.Code == client.CodeTurnFailed:
			var failed client.TurnFailed
			_ = e.DecodeData(&failed)
			if failed.Partial != "" {
				fmt.Fprintln(ch.stderr, text(failed.Partial))
			}
			if failed.RunID != "" {
				err = fmt.Errorf("%w\n  more: weir runs get %s", err, failed.RunID)
			}
			return nil, err
		case refused && e.Code == client.CodeBusy:
			return nil, fmt.Errorf("%w; try again later, or in another --session", err)
		default:
			return nil, err
		}
	}
}

// cancelTurn ends what the session is at.
func (ch *chat) cancelTurn(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, cancelWithin)
	defer cancel()
	fmt.Fprintln(ch.stderr, "\n  cancelling the turn; once more to leave it to itself")
	var status struct {
		RunID string `json:"runId"`
	}
	err := ch.client.Call(ctx, "agent.status", map[string]string{"sessionId": ch.session}, &status, client.Reads)
	if err == nil && status.RunID != "" {
		_, err = ch.client.CancelRun(ctx, status.RunID, "interrupted from the command line")
	}
	if err != nil && ctx.Err() == nil {
		fmt.Fprintf(ch.stderr, "  cancel: %v\n", err)
	}
}

// converse reads messages from a terminal until its end.
func (ch *chat) converse(ctx context.Context, in *os.File, out io.Writer) error {
	fresh := ch.session == ""
	if fresh {
		ch.session = newSessionID()
	}
	name := ch.agent
	if name == "" {
		name = defaultAgent
	}
	fmt.Fprintf(out, "Talking to %s at %s. A line that ends in \\ goes on in the next; /help says more, Ctrl-D ends.\n", name, ch.client.URL())
	lines := &lineReader{in: in, out: out}
	used := false
	for {
		message, err := lines.read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		switch strings.TrimSpace(message) {
		case "":
			continue
		case "/quit", "/exit":
			err = io.EOF
		case "/help":
			fmt.Fprintln(out, "  /new begins another session, /session names this one, /quit ends.\n  Up and down bring earlier lines back. Ctrl-C during an answer cancels the turn.")
			continue
		case "/new":
			ch.session, used = newSessionID(), false
			fmt.Fprintln(out, "  a new session")
			continue
		case "/session":
			fmt.Fprintln(out, "  "+ch.session)
			continue
		}
		if err != nil {
			break
		}
		used = true
		began := time.Now()
		result, err := ch.turn(ctx, message)
		if err != nil {
			fmt.Fprintln(out, "  "+errorText(err))
			continue
		}
		fmt.Fprintln(out, answerText(out, result.Response))
		note := fmt.Sprintf("%d tokens, %s", result.TokensUsed.Total, brief(time.Since(began)))
		if result.CostMicros > 0 {
			note += fmt.Sprintf(", $%.4f", float64(result.CostMicros)/1e6)
		}
		fmt.Fprintln(out, dim(out, "  "+note))
	}
	if used {
		fmt.Fprintf(out, "\nContinue with: weir chat --session %s\n", ch.session)
	}
	return nil
}

func dim(w io.Writer, s string) string {
	if !isTerminal(w) || os.Getenv("NO_COLOR") != "" {
		return s
	}
	return "\x1b[2m" + s + "\x1b[0m"
}

// lineReader reads messages with editing and history. The terminal is raw only
// while a line is read, so that Ctrl-C reaches us during a turn.
type lineReader struct {
	in   *os.File
	out  io.Writer
	term *term.Terminal
}

func (l *lineReader) read() (string, error) {
	if l.term == nil {
		l.term = term.NewTerminal(struct {
			io.Reader
			io.Writer
		}{l.in, l.out}, "> ")
	}
	before, err := term.MakeRaw(int(l.in.Fd()))
	if err != nil {
		return "", fmt.Errorf("prepare the terminal: %w", err)
	}
	defer func() { _ = term.Restore(int(l.in.Fd()), before) }()
	if width, height, err := term.GetSize(int(l.in.Fd())); err == nil && width > 0 {
		_ = l.term.SetSize(width, height)
	}
	l.term.SetBracketedPasteMode(true)
	defer l.term.SetBracketedPasteMode(false)
	var message []string
	l.term.SetPrompt("> ")
	for {
		line, err := l.term.ReadLine()
		pasted := errors.Is(err, term.ErrPasteIndicator)
		if err != nil && !pasted {
			return "", err
		}
		more, goesOn := strings.CutSuffix(line, `\`)
		if goesOn {
			line = more
		}
		message = append(message, line)
		if !goesOn && !pasted {
			return strings.Join(message, "\n"), nil
		}
		l.term.SetPrompt("… ")
	}
}
