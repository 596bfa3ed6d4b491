package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"

	"github.com/google/uuid"
	"github.com/knadh/koanf/parsers/yaml"
	"github.com/spf13/cobra"
)

func newAgents() *cobra.Command {
	return parent("agents", "Lists, shows and creates agents", newAgentsLs(), newAgentsGet(), newAgentsCreate())
}

// agentLine is an agent in a list.
type agentLine struct {
	AgentID   string `json:"agentId"`
	Provider  string `json:"provider"`
	Model     string `json:"model"`
	Tools     int    `json:"tools"`
	Suspended bool   `json:"suspended"`
}

// agentReaders bounds how many agents are read at once.
const agentReaders = 8

func newAgentsLs() *cobra.Command {
	return remoteCommand(&cobra.Command{Use: "ls", Aliases: []string{"list"}, Short: "Lists the agents", Args: cobra.NoArgs}, nil,
		func(cmd *cobra.Command, r *remote, _ []string) error {
			names, err := r.AgentNames(cmd.Context())
			if err != nil {
				return err
			}
			slices.Sort(names)
			lines := make([]agentLine, len(names))
			errs := make([]error, len(names))
			var wg sync.WaitGroup
			places := make(chan struct{}, agentReaders)
			for i, name := range names {
				wg.Go(func() {
					places <- struct{}{}
					defer func() { <-places }()
					a, err := r.Agent(cmd.Context(), name)
					if err != nil {
						errs[i] = err
						return
					}
					lines[i] = agentLine{AgentID: a.AgentID, Suspended: a.Suspended}
					var c struct {
						Provider string            `json:"provider"`
						Model    string            `json:"model"`
						Tools    []json.RawMessage `json:"tools"`
					}
					if errs[i] = json.Unmarshal(a.Config, &c); errs[i] == nil {
						lines[i].Provider, lines[i].Model, lines[i].Tools = c.Provider, c.Model, len(c.Tools)
					}
				})
			}
			wg.Wait()
			if err := errors.Join(errs...); err != nil {
				return err
			}
			return list(&r.out, cmd, lines, "AGENT PROVIDER MODEL TOOLS STATE", func(a agentLine) []any {
				state := "active"
				if a.Suspended {
					state = "suspended"
				}
				return []any{a.AgentID, a.Provider, a.Model, a.Tools, state}
			})
		})
}

func newAgentsGet() *cobra.Command {
	return remoteCommand(&cobra.Command{
		Use: "get NAME", Short: "Shows an agent's configuration", Args: cobra.ExactArgs(1), ValidArgsFunction: completeAgents,
	}, nil, func(cmd *cobra.Command, r *remote, args []string) error {
		a, err := r.Agent(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		return r.out.one(cmd, a, func() {
			fmt.Fprintln(cmd.OutOrStdout(), indented(a.Config))
			if a.Suspended {
				fmt.Fprintln(cmd.ErrOrStderr(), "the agent is suspended: it takes no messages")
			}
		})
	})
}

func indented(raw json.RawMessage) string {
	var b bytes.Buffer
	if json.Indent(&b, raw, "", "  ") != nil {
		return string(raw)
	}
	return b.String()
}

func newAgentsCreate() *cobra.Command {
	var file string
	members := map[string]*string{}
	flags := []struct{ member, flag, usage string }{
		{"provider", "provider", "offline, openai, anthropic, or one of the config file"},
		{"model", "model", "model of that provider"},
		{"instructions", "instructions", "what the agent is told first"},
		{"baseUrl", "base-url", "address of the provider, in place of its own"},
		{"apiKeySecret", "api-key-secret", "name of the secret with the provider's key"},
		{"profile", "profile", "assistant or standard"},
	}
	cmd := &cobra.Command{
		Use: "create [NAME]", Short: "Creates an agent, from flags or a file", Args: cobra.MaximumNArgs(1),
		Long: `Creates an agent. A file holds its whole configuration, in JSON or YAML (see
contract/surface.md §2); NAME and flags win over it. -f - reads standard input.`,
		Example: "  weir agents create helper --provider openai --model gpt-5-mini --instructions \"You are brief.\"\n  weir agents create -f researcher.yaml",
	}
	return remoteCommand(cmd, func(cmd *cobra.Command) {
		cmd.Flags().StringVarP(&file, "file", "f", "", "configuration in JSON or YAML; - is standard input")
		for _, f := range flags {
			members[f.member] = cmd.Flags().String(f.flag, "", f.usage)
		}
	}, func(cmd *cobra.Command, r *remote, args []string) error {
		config := map[string]json.RawMessage{}
		if file != "" {
			var err error
			if config, err = readAgentFile(file, cmd.InOrStdin()); err != nil {
				return err
			}
		}
		set := func(member, value string) error {
			raw, err := json.Marshal(value)
			config[member] = raw
			return err
		}
		for _, f := range flags {
			if cmd.Flags().Changed(f.flag) {
				if err := set(f.member, *members[f.member]); err != nil {
					return err
				}
			}
		}
		if len(args) == 1 {
			if err := set("name", args[0]); err != nil {
				return err
			}
		}
		if config["name"] == nil {
			return usagef("give the agent a NAME, or a file that has one")
		}
		raw, err := json.Marshal(config)
		if err != nil {
			return err
		}
		a, err := r.CreateAgent(cmd.Context(), raw, uuid.NewString())
		if err != nil {
			return err
		}
		return r.out.one(cmd, a, func() {
			fmt.Fprintf(cmd.OutOrStdout(), "agent %s is there; talk to it with: weir chat -a %s\n", a.AgentID, a.AgentID)
		})
	})
}

// readAgentFile reads a configuration. JSON is kept as it is written; the API
// checks it.
func readAgentFile(name string, stdin io.Reader) (map[string]json.RawMessage, error) {
	var content []byte
	var err error
	if name == "-" {
		content, err = io.ReadAll(stdin)
	} else {
		content, err = os.ReadFile(name)
	}
	if err != nil {
		return nil, usagef("%v", err)
	}
	config := map[string]json.RawMessage{}
	if trimmed := bytes.TrimSpace(content); len(trimmed) > 0 && trimmed[0] == '{' {
		if err := json.Unmarshal(trimmed, &config); err != nil {
			return nil, usagef("%s: %v", name, err)
		}
		return config, nil
	}
	members, err := yaml.Parser().Unmarshal(content)
	if err != nil {
		return nil, usagef("%s: %v", name, err)
	}
	for key, value := range members {
		if config[key], err = json.Marshal(value); err != nil {
			return nil, usagef("%s: %s: %v", name, key, err)
		}
	}
	return config, nil
}
