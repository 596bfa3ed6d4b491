package check

import (
	"context"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
	"github.com/stretchr/testify/require"
)

// compose loads deploy/compose.yaml as docker compose does, with nothing of this
// machine's environment.
func compose(t *testing.T, env []string, profiles ...string) *types.Project {
	t.Helper()
	options, err := cli.NewProjectOptions([]string{deploy("compose.yaml")}, cli.WithEnv(env), cli.WithProfiles(profiles), cli.WithResolvedPaths(true))
	require.NoError(t, err)
	project, err := options.LoadProject(context.Background())
	require.NoError(t, err)
	return project
}

// poolerEnv is deploy/pgbouncer.env.
func poolerEnv(t *testing.T) []string {
	t.Helper()
	var env []string
	for line := range strings.Lines(read(t, deploy("pgbouncer.env"))) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			env = append(env, line)
		}
	}
	return env
}

func TestComposeServices(t *testing.T) {
	plain := compose(t, nil)
	require.ElementsMatch(t, []string{"postgres", "migrate", "api", "worker"}, plain.ServiceNames())
	project := compose(t, nil, "pgbouncer", "observability")
	require.ElementsMatch(t, []string{"postgres", "migrate", "api", "worker", "pgbouncer", "prometheus", "grafana"}, project.ServiceNames())
	for name, s := range project.Services {
		t.Run(name, func(t *testing.T) {
			require.True(t, s.ReadOnly)
			require.Equal(t, []string{"ALL"}, s.CapDrop)
			require.Contains(t, s.SecurityOpt, "no-new-privileges:true")
			require.False(t, s.Privileged)
			requirePinned(t, s.Image)
			for _, p := range s.Ports {
				require.Equal(t, "127.0.0.1", p.HostIP, "nothing is open to others by default")
			}
			for _, v := range s.Volumes {
				if v.Type == types.VolumeTypeBind {
					require.True(t, v.ReadOnly, v.Target)
					require.FileExists(t, v.Source+sentinel(v.Source), v.Target)
				}
			}
			if name == "migrate" {
				require.Equal(t, "no", s.Restart)
				require.Nil(t, s.HealthCheck)
				return
			}
			require.Equal(t, "unless-stopped", s.Restart)
			require.NotNil(t, s.HealthCheck, "nobody would know whether it works")
			require.NotNil(t, s.StopGracePeriod)
		})
	}
	for _, name := range []string{"api", "worker"} {
		s := project.Services[name]
		require.Equal(t, 2, *s.Deploy.Replicas)
		require.NotZero(t, s.Deploy.Resources.Limits.MemoryBytes)
		require.Equal(t, types.ServiceConditionCompletedSuccessfully, s.DependsOn["migrate"].Condition)
		require.Equal(t, types.ServiceConditionHealthy, s.DependsOn["postgres"].Condition)
		require.False(t, s.DependsOn["pgbouncer"].Required, "its profile may be off")
	}
	require.Equal(t, "healthy", strings.TrimPrefix(project.Services["migrate"].DependsOn["postgres"].Condition, "service_"))
}

// sentinel is a file that a mounted folder must have.
func sentinel(source string) string {
	switch {
	case strings.HasSuffix(source, "/provisioning"):
		return "/datasources/prometheus.yaml"
	case strings.HasSuffix(source, "/grafana"):
		return "/fleet.json"
	default:
		return ""
	}
}

func TestComposeRunsWeir(t *testing.T) {
	project := compose(t, nil)
	image := dockerfile(t)
	for _, name := range []string{"migrate", "api", "worker"} {
		s := project.Services[name]
		t.Run(name, func(t *testing.T) {
			require.Empty(t, s.Entrypoint, "the image's entry point is weir")
			require.Empty(t, s.User, "the image's user is no root")
			env := map[string]bool{}
			for key := range s.Environment {
				env[key] = true
			}
			if name == "migrate" {
				delete(env, "WEIR_LOG_FORMAT") // what all services share
				delete(env, "WEIR_LOG_LEVEL")
			}
			command, flags := runsWeir(t, s.Command, env)
			require.Equal(t, name, command[0])
			if name == "migrate" {
				return
			}
			host, port, err := net.SplitHostPort(flags["listen"])
			require.NoError(t, err)
			require.Equal(t, "0.0.0.0", host, "others must reach it")
			require.Contains(t, image.exposed, port)
			drain, err := time.ParseDuration(flags["drain"])
			require.NoError(t, err)
			require.Greater(t, time.Duration(*s.StopGracePeriod), drain+17*time.Second, "it would be killed while it drains")
			require.Equal(t, types.HealthCheckTest{"CMD", "/probe", "http://127.0.0.1:" + port + "/readyz"}, s.HealthCheck.Test)
			require.Contains(t, image.files, "/probe")
			require.Greater(t, time.Duration(*s.HealthCheck.Timeout), 3*time.Second, "the probe waits 3 s")
			require.Greater(t, time.Duration(*s.HealthCheck.StartPeriod), 30*time.Second, "a process waits 30 s for its database")
		})
	}
	// What answers is what is published.
	require.EqualValues(t, 5003, project.Services["api"].Ports[0].Target)
}

func TestComposePooler(t *testing.T) {
	urls := func(env []string, profiles ...string) (pooled, direct string) {
		s := compose(t, env, profiles...).Services["api"]
		return *s.Environment["WEIR_DATABASE_URL"], *s.Environment["WEIR_DATABASE_URL_DIRECT"]
	}
	pooled, direct := urls(nil)
	require.Equal(t, direct, pooled, "without a pooler there is one way")
	env := poolerEnv(t)
	require.Contains(t, env, "COMPOSE_PROFILES=pgbouncer")
	pooled, direct = urls(env, "pgbouncer")
	require.Contains(t, pooled, "@pgbouncer:6432/weir")
	require.Contains(t, direct, "@postgres:5432/weir")
	migrate := compose(t, env, "pgbouncer").Services["migrate"]
	require.Contains(t, *migrate.Environment["WEIR_DATABASE_URL"], "@postgres:5432/weir", "migrations lock, so they go past the pooler")

	ini := read(t, deploy("pgbouncer", "pgbouncer.ini"))
	require.Contains(t, ini, "listen_port = 6432")
	require.Contains(t, ini, "pool_mode = transaction")
	require.Contains(t, ini, "weir = host=postgres port=5432")
	require.NotContains(t, ini, "password")
}

func TestComposePasswords(t *testing.T) {
	// No value of a variable that is a secret is written down, except as a
	// default that the environment replaces.
	text := read(t, deploy("compose.yaml"))
	for line := range strings.Lines(text) {
		upper := strings.ToUpper(line)
		if strings.Contains(upper, "PASSWORD:") && !strings.Contains(line, "${") {
			t.Errorf("a password in clear: %s", strings.TrimSpace(line))
		}
	}
	s := compose(t, []string{"POSTGRES_PASSWORD=other", "GRAFANA_PASSWORD=another"}, "observability", "pgbouncer")
	require.Contains(t, *s.Services["worker"].Environment["WEIR_DATABASE_URL"], ":other@")
	require.Equal(t, "other", *s.Services["postgres"].Environment["POSTGRES_PASSWORD"])
	require.Equal(t, "other", *s.Services["pgbouncer"].Environment["PASSWORD"])
	require.Equal(t, "another", *s.Services["grafana"].Environment["GF_SECURITY_ADMIN_PASSWORD"])
}

// TestComposePoolerScript runs what the service runs, up to PgBouncer itself.
func TestComposePoolerScript(t *testing.T) {
	s := compose(t, poolerEnv(t), "pgbouncer").Services["pgbouncer"]
	dir := t.TempDir()
	script := strings.NewReplacer("$$", "$", "/run/pgbouncer", dir, "/etc/pgbouncer", dir, "exec pgbouncer", "echo pgbouncer").Replace(s.Command[0])
	cmd := exec.Command("/bin/sh", "-ec", script)
	cmd.Env = []string{"PATH=/bin:/usr/bin", "PASSWORD=pass"}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Equal(t, "\"weir\" \"pass\"\n", read(t, dir+"/userlist.txt"))
	require.Equal(t, "pgbouncer "+dir+"/pgbouncer.ini\n", string(out))
	require.Contains(t, read(t, deploy("pgbouncer", "pgbouncer.ini")), "auth_file = /run/pgbouncer/userlist.txt")
}
