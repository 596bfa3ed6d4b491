package model

import (
	"crypto/sha256"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestToolNames(t *testing.T) {
	t.Parallel()
	hash := func(name string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(name)))[:8] }
	long := strings.Repeat("a", 60)
	for name, c := range map[string]struct {
		tools []string
		want  map[string]string
	}{
		"NoTools":          {},
		"UnchangedNames":   {tools: []string{"web_fetch", "A-1"}, want: map[string]string{"web_fetch": "web_fetch", "A-1": "A-1"}},
		"ClientTool":       {tools: []string{"crm::lookup"}, want: map[string]string{"crm::lookup": "crm__lookup"}},
		"Dots":             {tools: []string{"a.b:c"}, want: map[string]string{"a.b:c": "a_b_c"}},
		"PlainNameIsKept":  {tools: []string{"a.b", "a_b"}, want: map[string]string{"a_b": "a_b", "a.b": "a_b_" + hash("a.b")}},
		"OthersThatClash":  {tools: []string{"a.b", "a:b"}, want: map[string]string{"a:b": "a_b_" + hash("a:b"), "a.b": "a_b_" + hash("a.b")}},
		"SixtyFourIsShort": {tools: []string{long + "::xy"}, want: map[string]string{long + "::xy": long + "__xy"}},
		"LongName":         {tools: []string{long + "::xyz"}, want: map[string]string{long + "::xyz": long[:55] + "_" + hash(long+"::xyz")}},
		"LongClash":        {tools: []string{long + ".b", long + ":b"}, want: map[string]string{long + ".b": long[:55] + "_" + hash(long+".b"), long + ":b": long[:55] + "_" + hash(long+":b")}},
		"OtherAlphabets":   {tools: []string{"größe"}, want: map[string]string{"größe": "gr__e"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			req := &Request{}
			for _, tool := range c.tools {
				req.Tools = append(req.Tools, Tool{Name: tool})
			}
			names := newToolNames(req)
			for our, their := range c.want {
				require.Equal(t, their, names.their(our))
				require.Equal(t, our, names.our(their), "and back")
				require.Regexp(t, regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`), their)
			}
			require.Equal(t, "made_up", names.our("made_up"))
		})
	}

	t.Run("HistoryNamesToolsThatAreGone", func(t *testing.T) {
		t.Parallel()
		names := newToolNames(&Request{Messages: []Message{{Role: RoleAssistant, Calls: []ToolCall{{Tool: "old::tool"}}}}})
		require.Equal(t, "old__tool", names.their("old::tool"))
	})
}
