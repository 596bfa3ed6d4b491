package check

import (
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// namedPod is the pod that an object makes.
type namedPod struct {
	name   string
	labels map[string]string
	spec   core.PodSpec
	served bool // it runs on and is asked over HTTP
}

func pods(objects []meta.Object) (all []namedPod) {
	for _, o := range objects {
		switch o := o.(type) {
		case *apps.Deployment:
			all = append(all, namedPod{o.Name, o.Spec.Template.Labels, o.Spec.Template.Spec, true})
		case *batch.Job:
			all = append(all, namedPod{o.Name, o.Spec.Template.Labels, o.Spec.Template.Spec, false})
		case *core.Pod:
			all = append(all, namedPod{o.Name, o.Labels, o.Spec, false})
		}
	}
	return all
}

// requirePort checks that each selected pod has a port of that name.
func requirePort(t *testing.T, r *rendered, s labels.Selector, name string) {
	t.Helper()
	found := false
	for _, p := range pods(r.all()) {
		if !s.Matches(labels.Set(p.labels)) {
			continue
		}
		found = true
		require.True(t, slices.ContainsFunc(p.spec.Containers[0].Ports, func(port core.ContainerPort) bool { return port.Name == name }),
			"%s has no port %q", p.name, name)
	}
	require.True(t, found)
}

type reference struct{ kind, name, key string }

// references are the secrets and config maps that a pod cannot start without.
func references(p core.PodSpec) (all []reference) {
	need := func(optional *bool) bool { return optional == nil || !*optional }
	for _, c := range p.Containers {
		for _, e := range c.Env {
			if e.ValueFrom == nil {
				continue
			}
			if s := e.ValueFrom.SecretKeyRef; s != nil && need(s.Optional) {
				all = append(all, reference{"Secret", s.Name, s.Key})
			}
			if m := e.ValueFrom.ConfigMapKeyRef; m != nil && need(m.Optional) {
				all = append(all, reference{"ConfigMap", m.Name, m.Key})
			}
		}
		for _, e := range c.EnvFrom {
			if s := e.SecretRef; s != nil && need(s.Optional) {
				all = append(all, reference{"Secret", s.Name, ""})
			}
			if m := e.ConfigMapRef; m != nil && need(m.Optional) {
				all = append(all, reference{"ConfigMap", m.Name, ""})
			}
		}
	}
	for _, v := range p.Volumes {
		if v.Secret != nil && need(v.Secret.Optional) {
			all = append(all, reference{"Secret", v.Secret.SecretName, ""})
		}
		if v.ConfigMap != nil && need(v.ConfigMap.Optional) {
			all = append(all, reference{"ConfigMap", v.ConfigMap.Name, ""})
		}
	}
	for _, s := range p.ImagePullSecrets {
		all = append(all, reference{"Secret", s.Name, ""})
	}
	return all
}

// theirs are the objects that the values files name and others make.
var theirs = []string{"pg", "keys", "model-keys", "our-ca", "registry", "weir-test"}

// TestPodsReferWhatExists: the chart makes what a pod needs, or its user names it.
func TestPodsReferWhatExists(t *testing.T) {
	forEachValues(t, func(t *testing.T, values map[string]any, r *rendered) {
		all := r.all()
		for _, p := range pods(all) {
			for _, ref := range references(p.spec) {
				if slices.Contains(theirs, ref.name) {
					continue
				}
				if ref.kind == "Secret" {
					s, ok := named[*core.Secret](all, ref.name)
					require.True(t, ok, "%s needs secret %s", p.name, ref.name)
					if ref.key != "" {
						require.Contains(t, s.StringData, ref.key)
					}
					continue
				}
				m, ok := named[*core.ConfigMap](all, ref.name)
				require.True(t, ok, "%s needs config map %s", p.name, ref.name)
				if ref.key != "" {
					require.Contains(t, m.Data, ref.key)
				}
			}
			if p.spec.ServiceAccountName != "default" {
				_, ok := named[*core.ServiceAccount](all, p.spec.ServiceAccountName)
				require.True(t, ok, "%s needs account %s", p.name, p.spec.ServiceAccountName)
			}
			for _, c := range p.spec.Containers {
				for _, m := range c.VolumeMounts {
					require.True(t, slices.ContainsFunc(p.spec.Volumes, func(v core.Volume) bool { return v.Name == m.Name }),
						"%s mounts %s, which is no volume", p.name, m.Name)
				}
			}
		}
	})
}

// TestPodsAreRestricted: the restricted profile of the pod security standards,
// and a root file system that nobody can write.
func TestPodsAreRestricted(t *testing.T) {
	forEachValues(t, func(t *testing.T, _ map[string]any, r *rendered) {
		for _, p := range pods(r.all()) {
			s := p.spec
			require.False(t, s.HostNetwork || s.HostPID || s.HostIPC, p.name)
			require.False(t, *s.AutomountServiceAccountToken, "%s asks nothing of Kubernetes", p.name)
			require.False(t, *s.EnableServiceLinks, "a service called weir would set WEIR_ variables in %s", p.name)
			require.True(t, *s.SecurityContext.RunAsNonRoot, p.name)
			require.NotZero(t, *s.SecurityContext.RunAsUser, p.name)
			require.Equal(t, core.SeccompProfileTypeRuntimeDefault, s.SecurityContext.SeccompProfile.Type, p.name)
			for _, v := range s.Volumes {
				require.Nil(t, v.HostPath, p.name)
			}
			require.Len(t, s.Containers, 1)
			c := s.Containers[0]
			require.NotNil(t, c.SecurityContext, p.name)
			require.True(t, *c.SecurityContext.RunAsNonRoot, p.name)
			require.True(t, *c.SecurityContext.ReadOnlyRootFilesystem, p.name)
			require.False(t, *c.SecurityContext.AllowPrivilegeEscalation, p.name)
			require.Equal(t, []core.Capability{"ALL"}, c.SecurityContext.Capabilities.Drop, p.name)
			require.Empty(t, c.SecurityContext.Capabilities.Add, p.name)
			require.False(t, c.Resources.Limits.Memory().IsZero(), "%s has no memory limit", p.name)
			require.False(t, c.Resources.Requests.Cpu().IsZero(), "%s requests no CPU", p.name)
			requirePinned(t, c.Image)
		}
	})
}

// requirePinned checks that an image has a tag other than latest, or a digest.
func requirePinned(t *testing.T, image string) {
	t.Helper()
	if strings.Contains(image, "@sha256:") {
		return
	}
	_, tag, ok := strings.Cut(image[strings.LastIndex(image, "/")+1:], ":")
	require.True(t, ok && tag != "" && tag != "latest", "image %s is not pinned", image)
}

// TestPodsRunWeir holds what pods are told against the binary.
func TestPodsRunWeir(t *testing.T) {
	forEachValues(t, func(t *testing.T, _ map[string]any, r *rendered) {
		for _, p := range pods(r.all()) {
			c := p.spec.Containers[0]
			require.Empty(t, c.Command, "the image's entry point is weir")
			env := map[string]bool{}
			for _, e := range c.Env {
				require.False(t, env[e.Name], "%s: %s twice", p.name, e.Name)
				env[e.Name] = true
			}
			command, flags := runsWeir(t, c.Args, env)
			if !p.served {
				continue
			}
			require.Contains(t, []string{"api", "worker", "scheduler"}, command[0])
			require.True(t, env["GOMEMLIMIT"], "%s: Go does not know its memory limit", p.name)
			if file := flags["config"]; file != "" {
				m, ok := named[*core.ConfigMap](r.objects, p.spec.Volumes[0].ConfigMap.Name)
				require.True(t, ok)
				require.Contains(t, m.Data, strings.TrimPrefix(file, c.VolumeMounts[0].MountPath+"/"))
			}

			// Where it listens is where it is asked.
			_, port, err := net.SplitHostPort(flags["listen"])
			require.NoError(t, err)
			require.Len(t, c.Ports, 1)
			require.Equal(t, port, strconv.Itoa(int(c.Ports[0].ContainerPort)))
			for path, probe := range map[string][]*core.Probe{"/livez": {c.StartupProbe, c.LivenessProbe}, "/readyz": {c.ReadinessProbe}} {
				for _, probe := range probe {
					require.NotNil(t, probe, "%s: %s", p.name, path)
					require.Equal(t, path, probe.HTTPGet.Path)
					require.Equal(t, c.Ports[0].Name, probe.HTTPGet.Port.StrVal)
				}
			}
			require.Greater(t, c.ReadinessProbe.TimeoutSeconds, int32(2), "readyz may think for 2 s")
			require.Greater(t, c.StartupProbe.PeriodSeconds*c.StartupProbe.FailureThreshold, int32(30), "a process waits 30 s for its database")

			// It has time to stop: its drain, and 17 s for last answers (2 s), a
			// suspect's process (5 s) and last commits (10 s).
			need := seconds(t, flags["drain"]) + 17
			if c.Lifecycle != nil {
				need += c.Lifecycle.PreStop.Sleep.Seconds
			}
			require.Greater(t, *p.spec.TerminationGracePeriodSeconds, need, "%s would be killed while it drains", p.name)
		}
	})
}

func TestMemoryLimits(t *testing.T) {
	r, err := render(valuesOf(t, "testdata/values/full.yaml"))
	require.NoError(t, err)
	got := map[string]string{}
	for _, p := range pods(r.objects) {
		for _, e := range p.spec.Containers[0].Env {
			if e.Name == "GOMEMLIMIT" {
				got[p.name] = e.Value
			}
		}
	}
	require.Equal(t, map[string]string{
		"prod-weir-api": "460MiB", "prod-weir-worker-default": "921MiB", "prod-weir-worker-background": "460MiB",
		"prod-weir-worker-trusted": "921MiB", "prod-weir-scheduler": "230MiB",
	}, got)
}
