package check

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/promql/parser"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

type alertRule struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

type alertGroup struct {
	Name  string      `json:"name"`
	Rules []alertRule `json:"rules"`
}

func alertGroups(t *testing.T) []alertGroup {
	t.Helper()
	var file struct {
		Groups []alertGroup `json:"groups"`
	}
	require.NoError(t, yaml.UnmarshalStrict([]byte(read(t, deploy("prometheus", "alerts.yml"))), &file))
	return file.Groups
}

var promQL = parser.NewParser(parser.Options{})

func TestAlerts(t *testing.T) {
	runbooks, err := filepath.Glob(filepath.Join(root, "docs", "runbooks", "Weir*.md"))
	require.NoError(t, err)
	unused := map[string]bool{}
	for _, path := range runbooks {
		unused[filepath.Base(path)] = true
	}
	tests := read(t, deploy("prometheus", "alerts_test.yml"))
	seen := map[string]bool{}
	for _, g := range alertGroups(t) {
		for _, a := range g.Rules {
			t.Run(a.Alert, func(t *testing.T) {
				require.False(t, seen[a.Alert], "twice")
				seen[a.Alert] = true
				_, err := promQL.ParseExpr(a.Expr)
				require.NoError(t, err)
				require.Contains(t, []string{"critical", "warning"}, a.Labels["severity"])
				require.NotEmpty(t, a.Annotations["summary"])
				require.NotEmpty(t, a.Annotations["description"])
				page := a.Alert + ".md"
				require.Equal(t, "https://github.com/weir-run/weir/blob/main/docs/runbooks/"+page, a.Annotations["runbook_url"])
				delete(unused, page)
				text := read(t, filepath.Join(root, "docs", "runbooks", page))
				for _, part := range []string{"# " + a.Alert + "\n", "\n## What it means\n", "\n## What to look at\n", "\n## What to do\n"} {
					require.Contains(t, text, part)
				}
				require.Regexp(t, `\b`+a.Alert+`\b`, tests, "alerts_test.yml does not try it")
			})
		}
	}
	require.Empty(t, unused, "pages of no alert")
}

type panel struct {
	ID          int            `json:"id"`
	Type        string         `json:"type"`
	Title       string         `json:"title"`
	Description string         `json:"description"`
	GridPos     map[string]int `json:"gridPos"`
	Datasource  struct {
		UID string `json:"uid"`
	} `json:"datasource"`
	Targets []struct {
		RefID string `json:"refId"`
		Expr  string `json:"expr"`
	} `json:"targets"`
	FieldConfig struct {
		Defaults struct {
			Unit string `json:"unit"`
		} `json:"defaults"`
	} `json:"fieldConfig"`
}

func TestDashboards(t *testing.T) {
	files, err := filepath.Glob(deploy("grafana", "*.json"))
	require.NoError(t, err)
	require.Len(t, files, 3)
	uids := map[string]string{}
	variable := regexp.MustCompile(`\$\{?(\w+)\}?`)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			var board struct {
				UID        string  `json:"uid"`
				Title      string  `json:"title"`
				Panels     []panel `json:"panels"`
				Templating struct {
					List []struct {
						Name  string `json:"name"`
						Query any    `json:"query"`
					} `json:"list"`
				} `json:"templating"`
			}
			require.NoError(t, json.Unmarshal([]byte(read(t, file)), &board))
			require.NotEmpty(t, board.Title)
			require.NotEmpty(t, board.UID)
			require.Empty(t, uids[board.UID], "the uid is another dashboard's")
			uids[board.UID] = file
			variables := map[string]bool{"__rate_interval": true}
			for _, v := range board.Templating.List {
				variables[v.Name] = true
			}
			require.True(t, variables["datasource"])

			cells, ids := map[[2]int]string{}, map[int]bool{}
			for _, p := range board.Panels {
				require.False(t, ids[p.ID], "id %d twice", p.ID)
				ids[p.ID] = true
				for x := p.GridPos["x"]; x < p.GridPos["x"]+p.GridPos["w"]; x++ {
					require.Less(t, x, 24, p.Title)
					for y := p.GridPos["y"]; y < p.GridPos["y"]+p.GridPos["h"]; y++ {
						require.Empty(t, cells[[2]int{x, y}], "%s covers it", p.Title)
						cells[[2]int{x, y}] = p.Title
					}
				}
				if p.Type == "row" {
					continue
				}
				require.NotEmpty(t, p.Title)
				require.NotEmpty(t, p.Description, p.Title)
				require.NotEmpty(t, p.FieldConfig.Defaults.Unit, p.Title)
				require.Equal(t, "${datasource}", p.Datasource.UID, p.Title)
				require.NotEmpty(t, p.Targets, p.Title)
				for _, target := range p.Targets {
					for _, m := range variable.FindAllStringSubmatch(target.Expr, -1) {
						require.True(t, variables[m[1]], "%s: there is no $%s", p.Title, m[1])
					}
					_, err := promQL.ParseExpr(variable.ReplaceAllString(strings.ReplaceAll(target.Expr, "$__rate_interval", "5m"), "any"))
					require.NoError(t, err, p.Title)
				}
			}
		})
	}
}

// TestProvisioning: what Grafana is given fits what Prometheus is.
func TestProvisioning(t *testing.T) {
	var sources struct {
		Datasources []struct{ Type, URL string } `json:"datasources"`
	}
	require.NoError(t, yaml.Unmarshal([]byte(read(t, deploy("grafana", "provisioning", "datasources", "prometheus.yaml"))), &sources))
	require.Len(t, sources.Datasources, 1)
	require.Equal(t, "http://prometheus:9090", sources.Datasources[0].URL)
	project := compose(t, nil, "observability")
	require.Contains(t, project.ServiceNames(), "prometheus")

	var config struct {
		ScrapeConfigs []struct {
			JobName string `json:"job_name"`
			DNS     []struct {
				Names []string `json:"names"`
				Port  int      `json:"port"`
			} `json:"dns_sd_configs"`
		} `json:"scrape_configs"`
	}
	require.NoError(t, yaml.Unmarshal([]byte(read(t, deploy("prometheus", "prometheus.yml"))), &config))
	for _, s := range config.ScrapeConfigs {
		for _, d := range s.DNS {
			service, ok := project.Services[d.Names[0]]
			require.True(t, ok, "%s: there is no service %s", s.JobName, d.Names[0])
			require.Contains(t, strings.Join(service.Command, " "), fmt.Sprintf(":%d", d.Port), "%s does not listen there", s.JobName)
		}
	}
}

// TestPromtool asks Prometheus's own tool, if it is installed.
func TestPromtool(t *testing.T) {
	if _, err := exec.LookPath("promtool"); err != nil {
		t.Skip("promtool is not installed (Debian's package prometheus has it)")
	}
	for _, args := range [][]string{
		{"check", "rules", "alerts.yml"}, {"check", "config", "prometheus.yml"}, {"test", "rules", "alerts_test.yml"},
	} {
		t.Run(strings.Join(args[:2], " "), func(t *testing.T) {
			cmd := exec.Command("promtool", args...)
			cmd.Dir = deploy("prometheus")
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, string(out))
		})
	}
}
