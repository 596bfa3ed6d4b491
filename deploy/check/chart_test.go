package check

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/stretchr/testify/require"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	"helm.sh/helm/v3/pkg/release"
	"helm.sh/helm/v3/pkg/releaseutil"
	apps "k8s.io/api/apps/v1"
	autoscaling "k8s.io/api/autoscaling/v2"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"
)

var chartDir = deploy("helm", "weir")

// The parts of KEDA's kinds that the chart uses. Its own module would bring the
// whole of KEDA.
type scaledObject struct {
	meta.TypeMeta   `json:",inline"`
	meta.ObjectMeta `json:"metadata"`
	Spec            struct {
		ScaleTargetRef struct {
			Name string `json:"name"`
		} `json:"scaleTargetRef"`
		PollingInterval int32 `json:"pollingInterval"`
		CooldownPeriod  int32 `json:"cooldownPeriod"`
		MinReplicaCount int32 `json:"minReplicaCount"`
		MaxReplicaCount int32 `json:"maxReplicaCount"`
		Advanced        struct {
			HPA struct {
				Behavior autoscaling.HorizontalPodAutoscalerBehavior `json:"behavior"`
			} `json:"horizontalPodAutoscalerConfig"`
		} `json:"advanced"`
		Triggers []struct {
			Type       string            `json:"type"`
			MetricType string            `json:"metricType"`
			Metadata   map[string]string `json:"metadata"`
			Auth       struct {
				Name string `json:"name"`
			} `json:"authenticationRef"`
		} `json:"triggers"`
	} `json:"spec"`
}

type triggerAuthentication struct {
	meta.TypeMeta   `json:",inline"`
	meta.ObjectMeta `json:"metadata"`
	Spec            struct {
		SecretTargetRef []struct {
			Parameter string `json:"parameter"`
			Name      string `json:"name"`
			Key       string `json:"key"`
		} `json:"secretTargetRef"`
	} `json:"spec"`
}

// kinds are what the chart may make.
var kinds = map[string]func() meta.Object{
	"apps/v1 Deployment":                      func() meta.Object { return &apps.Deployment{} },
	"v1 Service":                              func() meta.Object { return &core.Service{} },
	"v1 ServiceAccount":                       func() meta.Object { return &core.ServiceAccount{} },
	"v1 Secret":                               func() meta.Object { return &core.Secret{} },
	"v1 ConfigMap":                            func() meta.Object { return &core.ConfigMap{} },
	"v1 Pod":                                  func() meta.Object { return &core.Pod{} },
	"batch/v1 Job":                            func() meta.Object { return &batch.Job{} },
	"policy/v1 PodDisruptionBudget":           func() meta.Object { return &policy.PodDisruptionBudget{} },
	"autoscaling/v2 HorizontalPodAutoscaler":  func() meta.Object { return &autoscaling.HorizontalPodAutoscaler{} },
	"networking.k8s.io/v1 NetworkPolicy":      func() meta.Object { return &networking.NetworkPolicy{} },
	"networking.k8s.io/v1 Ingress":            func() meta.Object { return &networking.Ingress{} },
	"monitoring.coreos.com/v1 ServiceMonitor": func() meta.Object { return &monitoring.ServiceMonitor{} },
	"monitoring.coreos.com/v1 PodMonitor":     func() meta.Object { return &monitoring.PodMonitor{} },
	"monitoring.coreos.com/v1 PrometheusRule": func() meta.Object { return &monitoring.PrometheusRule{} },
	"keda.sh/v1alpha1 ScaledObject":           func() meta.Object { return &scaledObject{} },
	"keda.sh/v1alpha1 TriggerAuthentication":  func() meta.Object { return &triggerAuthentication{} },
}

// rendered is a release: what would be installed, in Helm's order.
type rendered struct {
	objects []meta.Object // without hooks
	hooks   []hook        // by event and weight
	notes   string
}

type hook struct {
	*release.Hook
	object meta.Object
}

// all are the objects and the hooks'.
func (r *rendered) all() []meta.Object {
	all := slices.Clone(r.objects)
	for _, h := range r.hooks {
		all = append(all, h.object)
	}
	return all
}

func of[T meta.Object](objects []meta.Object) (found []T) {
	for _, o := range objects {
		if o, ok := o.(T); ok {
			found = append(found, o)
		}
	}
	return found
}

func named[T meta.Object](objects []meta.Object, name string) (T, bool) {
	for _, o := range of[T](objects) {
		if o.GetName() == name {
			return o, true
		}
	}
	var none T
	return none, false
}

func valuesOf(t *testing.T, path string) map[string]any {
	t.Helper()
	values, err := chartutil.ReadValuesFile(path)
	require.NoError(t, err)
	return values
}

// render does what helm install does before it talks to a cluster.
func render(values map[string]any) (*rendered, error) {
	chart, err := loader.Load(chartDir)
	if err != nil {
		return nil, err
	}
	caps := chartutil.DefaultCapabilities.Copy()
	caps.KubeVersion = chartutil.KubeVersion{Version: "v1.34.0", Major: "1", Minor: "34"}
	if !chartutil.IsCompatibleRange(chart.Metadata.KubeVersion, caps.KubeVersion.Version) {
		return nil, fmt.Errorf("kubeVersion %s refuses %s", chart.Metadata.KubeVersion, caps.KubeVersion.Version)
	}
	if err := chartutil.ProcessDependencies(chart, values); err != nil {
		return nil, err
	}
	top, err := chartutil.ToRenderValues(chart, values, chartutil.ReleaseOptions{Name: "prod", Namespace: "agents", Revision: 1, IsInstall: true}, caps)
	if err != nil {
		return nil, err
	}
	files, err := engine.Engine{Strict: true}.Render(chart, top)
	if err != nil {
		return nil, err
	}
	r := &rendered{}
	for name, text := range files {
		if strings.HasSuffix(name, "NOTES.txt") {
			r.notes = text
			delete(files, name)
		}
	}
	hooks, manifests, err := releaseutil.SortManifests(files, caps.APIVersions, releaseutil.InstallOrder)
	if err != nil {
		return nil, err
	}
	for _, m := range manifests {
		o, err := decode(m.Content)
		if err != nil {
			return nil, fmt.Errorf("%s: %w\n%s", m.Name, err, m.Content)
		}
		r.objects = append(r.objects, o)
	}
	for _, h := range hooks {
		o, err := decode(h.Manifest)
		if err != nil {
			return nil, fmt.Errorf("%s: %w\n%s", h.Path, err, h.Manifest)
		}
		r.hooks = append(r.hooks, hook{h, o})
	}
	return r, nil
}

// decode refuses members that the kind does not have, and those that come twice.
func decode(text string) (meta.Object, error) {
	var head meta.TypeMeta
	if err := yaml.Unmarshal([]byte(text), &head); err != nil {
		return nil, err
	}
	kind := kinds[head.APIVersion+" "+head.Kind]
	if kind == nil {
		return nil, fmt.Errorf("nobody knows %s %s", head.APIVersion, head.Kind)
	}
	o := kind()
	return o, yaml.UnmarshalStrict([]byte(text), o)
}

// forEachValues runs check on the release of every values file.
func forEachValues(t *testing.T, check func(t *testing.T, values map[string]any, r *rendered)) {
	t.Helper()
	files, err := filepath.Glob("testdata/values/*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			values := valuesOf(t, file)
			r, err := render(values)
			require.NoError(t, err)
			check(t, values, r)
		})
	}
}

func TestChartLint(t *testing.T) {
	files, err := filepath.Glob("testdata/values/*.yaml")
	require.NoError(t, err)
	for _, file := range files {
		for _, m := range lint.All(chartDir, valuesOf(t, file), "agents", true).Messages {
			if m.Severity > support.InfoSev {
				t.Errorf("%s: %s", file, m)
			}
		}
	}
}

func TestChartObjects(t *testing.T) {
	forEachValues(t, func(t *testing.T, _ map[string]any, r *rendered) {
		seen := map[string]bool{}
		for _, o := range r.all() {
			kind := fmt.Sprintf("%T", o)
			id := kind + " " + o.GetName()
			require.False(t, seen[id], "%s is there twice", id)
			seen[id] = true
			// As an API server checks them; a label may be as long as a name.
			require.Empty(t, validation.IsDNS1123Label(o.GetName()), id)
			require.Empty(t, o.GetNamespace(), "%s: helm decides the namespace", id)
			require.Equal(t, "weir", o.GetLabels()["app.kubernetes.io/name"], id)
			for key, value := range o.GetLabels() {
				require.Empty(t, validation.IsQualifiedName(key), id)
				require.Empty(t, validation.IsValidLabelValue(value), id)
			}
			for key := range o.GetAnnotations() {
				require.Empty(t, validation.IsQualifiedName(key), id)
			}
		}
		require.Contains(t, r.notes, "tokens create")
	})
}

// TestChartInstallsFromNothing: a hook may only use what exists when it runs.
func TestChartInstallsFromNothing(t *testing.T) {
	forEachValues(t, func(t *testing.T, values map[string]any, r *rendered) {
		ours := map[string]bool{} // secrets and accounts that the chart makes after the hooks
		for _, o := range r.objects {
			switch o.(type) {
			case *core.Secret, *core.ServiceAccount, *core.ConfigMap:
				ours[fmt.Sprintf("%T/%s", o, o.GetName())] = true
			}
		}
		before := map[string]int{}
		var job *hook
		for _, h := range r.hooks {
			if slices.Contains(h.Events, release.HookTest) {
				continue
			}
			require.ElementsMatch(t, []release.HookEvent{release.HookPreInstall, release.HookPreUpgrade}, h.Events, h.Name)
			require.Contains(t, h.DeletePolicies, release.HookBeforeHookCreation, "%s would fail the second time", h.Name)
			require.False(t, ours[fmt.Sprintf("%T/%s", h.object, h.Name)], "%s is also no hook", h.Name)
			if _, ok := h.object.(*batch.Job); ok {
				require.Nil(t, job, "one job")
				job = &h
				continue
			}
			before[fmt.Sprintf("%T/%s", h.object, h.Name)] = h.Weight
		}
		if m, ok := values["migrate"].(map[string]any); ok && m["enabled"] == false {
			require.Nil(t, job)
			return
		}
		require.NotNil(t, job)
		there := func(kind, name string) {
			weight, hooked := before[kind+"/"+name]
			require.True(t, hooked || !ours[kind+"/"+name], "%s %s is not there when the migration runs", kind, name)
			if hooked {
				require.Less(t, weight, job.Weight, "%s %s comes after the migration", kind, name)
			}
		}
		pod := job.object.(*batch.Job).Spec.Template.Spec
		require.Equal(t, core.RestartPolicyNever, pod.RestartPolicy)
		require.Contains(t, before, "*v1.ServiceAccount/"+pod.ServiceAccountName)
		there("*v1.ServiceAccount", pod.ServiceAccountName)
		for _, ref := range references(pod) {
			there("*v1."+ref.kind, ref.name)
		}
	})
}

func TestChartDeployments(t *testing.T) {
	forEachValues(t, func(t *testing.T, _ map[string]any, r *rendered) {
		deployments := of[*apps.Deployment](r.objects)
		require.NotEmpty(t, deployments)
		for _, d := range deployments {
			pod := labels.Set(d.Spec.Template.Labels)
			for _, other := range deployments {
				selects := selector(t, other.Spec.Selector).Matches(pod)
				require.Equal(t, other == d, selects, "%s selects pods of %s: %v", other.Name, d.Name, selects)
			}
			for _, job := range of[*batch.Job](r.all()) {
				require.False(t, selector(t, d.Spec.Selector).Matches(labels.Set(job.Spec.Template.Labels)), "%s selects the migration", d.Name)
			}
			require.Equal(t, apps.RollingUpdateDeploymentStrategyType, d.Spec.Strategy.Type)
			rolling := d.Spec.Strategy.RollingUpdate
			require.Equal(t, intstr.FromInt32(0), *rolling.MaxUnavailable, "%s loses capacity while it rolls", d.Name)
			require.NotEqual(t, intstr.FromInt32(0), *rolling.MaxSurge, "%s could not roll", d.Name)
			for _, spread := range d.Spec.Template.Spec.TopologySpreadConstraints {
				require.True(t, selector(t, spread.LabelSelector).Matches(pod), "%s does not spread its own pods", d.Name)
			}
		}
	})
}

// TestChartSelectors: what selects pods selects the right ones.
func TestChartSelectors(t *testing.T) {
	components := func(t *testing.T, r *rendered, s labels.Selector) (found []string) {
		t.Helper()
		set := map[string]bool{}
		for _, p := range pods(r.all()) {
			if s.Matches(labels.Set(p.labels)) {
				set[p.labels["app.kubernetes.io/component"]] = true
			}
		}
		return slices.Sorted(maps.Keys(set))
	}
	forEachValues(t, func(t *testing.T, _ map[string]any, r *rendered) {
		for _, s := range of[*core.Service](r.objects) {
			require.Equal(t, []string{"api"}, components(t, r, labels.SelectorFromSet(s.Spec.Selector)))
			for _, p := range s.Spec.Ports {
				requirePort(t, r, labels.SelectorFromSet(s.Spec.Selector), p.TargetPort.StrVal)
			}
		}
		for _, b := range of[*policy.PodDisruptionBudget](r.objects) {
			matched := 0
			for _, d := range of[*apps.Deployment](r.objects) {
				if selector(t, b.Spec.Selector).Matches(labels.Set(d.Spec.Template.Labels)) {
					matched++
				}
			}
			require.Equal(t, 1, matched, "budget %s", b.Name)
		}
		for _, p := range of[*networking.NetworkPolicy](r.all()) {
			s := selector(t, &p.Spec.PodSelector)
			require.Len(t, components(t, r, s), 1, "policy %s", p.Name)
			require.ElementsMatch(t, []networking.PolicyType{networking.PolicyTypeIngress, networking.PolicyTypeEgress}, p.Spec.PolicyTypes)
			for _, rule := range p.Spec.Ingress {
				for _, port := range rule.Ports {
					requirePort(t, r, s, port.Port.StrVal)
				}
			}
			require.NotEmpty(t, p.Spec.Egress, "%s could not reach its database", p.Name)
		}
		for _, m := range of[*monitoring.ServiceMonitor](r.objects) {
			service := of[*core.Service](r.objects)[0]
			require.True(t, selector(t, &m.Spec.Selector).Matches(labels.Set(service.Labels)))
			require.Equal(t, service.Spec.Ports[0].Name, m.Spec.Endpoints[0].Port)
		}
		for _, m := range of[*monitoring.PodMonitor](r.objects) {
			s := selector(t, &m.Spec.Selector)
			require.Subset(t, []string{"scheduler", "worker"}, components(t, r, s))
			requirePort(t, r, s, *m.Spec.PodMetricsEndpoints[0].Port)
		}
		for _, h := range of[*autoscaling.HorizontalPodAutoscaler](r.objects) {
			d, ok := named[*apps.Deployment](r.objects, h.Spec.ScaleTargetRef.Name)
			require.True(t, ok)
			require.Nil(t, d.Spec.Replicas, "an upgrade would undo what the autoscaler did")
			require.NotEmpty(t, d.Spec.Template.Spec.Containers[0].Resources.Requests.Cpu().String(), "utilization is of the request")
		}
		for _, i := range of[*networking.Ingress](r.objects) {
			for _, rule := range i.Spec.Rules {
				for _, path := range rule.HTTP.Paths {
					service, ok := named[*core.Service](r.objects, path.Backend.Service.Name)
					require.True(t, ok)
					require.Equal(t, service.Spec.Ports[0].Name, path.Backend.Service.Port.Name)
				}
			}
		}
		for _, rule := range of[*monitoring.PrometheusRule](r.objects) {
			require.Len(t, rule.Spec.Groups, len(alertGroups(t)), "the chart has all alerts")
		}
	})
}

func TestChartScaling(t *testing.T) {
	r, err := render(valuesOf(t, "testdata/values/full.yaml"))
	require.NoError(t, err)
	queries := map[string]string{}
	targets := map[string]string{}
	for _, s := range of[*scaledObject](r.objects) {
		d, ok := named[*apps.Deployment](r.objects, s.Spec.ScaleTargetRef.Name)
		require.True(t, ok)
		require.Nil(t, d.Spec.Replicas)
		require.LessOrEqual(t, s.Spec.MinReplicaCount, s.Spec.MaxReplicaCount)
		require.Len(t, s.Spec.Triggers, 1)
		trigger := s.Spec.Triggers[0]
		require.Equal(t, "postgresql", trigger.Type)
		require.Equal(t, "AverageValue", trigger.MetricType)
		auth, ok := named[*triggerAuthentication](r.objects, trigger.Auth.Name)
		require.True(t, ok)
		require.Equal(t, "direct", auth.Spec.SecretTargetRef[0].Key, "past the pooler")
		queries[s.Name], targets[s.Name] = trigger.Metadata["query"], trigger.Metadata["targetQueryValue"]
	}
	require.Equal(t, map[string]string{
		"prod-weir-worker-default":    "SELECT coalesce(sum(waiting + running), 0) FROM weir_backlog",
		"prod-weir-worker-background": "SELECT coalesce(sum(waiting + running), 0) FROM weir_backlog WHERE queue IN ('turns_bg', 'spawns')",
	}, queries)
	require.Equal(t, map[string]string{"prod-weir-worker-default": "192", "prod-weir-worker-background": "48"}, targets, "three quarters of the slots")
	for _, d := range of[*apps.Deployment](r.objects) {
		c := d.Spec.Template.Spec.Containers[0]
		if c.Args[0] == "worker" {
			require.Contains(t, c.Args, "--no-scheduler", "the scheduler keeps time")
		}
	}
}

func TestChartNoSecretInClear(t *testing.T) {
	forEachValues(t, func(t *testing.T, _ map[string]any, r *rendered) {
		for _, o := range r.all() {
			if _, ok := o.(*core.Secret); ok {
				continue
			}
			text, err := yaml.Marshal(o)
			require.NoError(t, err)
			require.NotContains(t, string(text), "postgres://", "%T %s", o, o.GetName())
		}
	})
}

// TestChartRefuses shows that the schema, or the chart in words, stops what
// could not work.
func TestChartRefuses(t *testing.T) {
	for name, c := range map[string]struct{ values, says string }{
		"NoDatabase":         {``, "database.existingSecret"},
		"TwoDatabases":       {`database: {existingSecret: a, url: "postgres://b"}`, "only one"},
		"URLOfOther":         {`database: {url: "mysql://b"}`, "/database/url"},
		"UnknownKey":         {`databse: {}`, "databse"},
		"UnknownOfPool":      {`workers: {default: {slot: 3}}`, "slot"},
		"UnknownQueue":       {`workers: {default: {queues: [turn]}}`, "/workers/default"},
		"QueueTwice":         {`workers: {default: {queues: [turns, turns]}}`, "/workers/default"},
		"NoSlots":            {`workers: {default: {slots: 0}}`, "/workers/default"},
		"SlotsAsText":        {`workers: {default: {slots: "256"}}`, "/workers/default"},
		"PoolName":           {`workers: {Default_Pool: {}}`, "Default_Pool"},
		"PoolNameTooLong":    {`workers: {a-name-of-seventeen: {}}`, "a-name-of-seventeen"},
		"NoMemoryLimit":      {`workerDefaults: {resources: {limits: null}}`, "/workerDefaults/resources"},
		"BadQuantity":        {`api: {resources: {limits: {memory: 512MB}}}`, "/api/resources"},
		"Lease":              {`workerDefaults: {lease: 10}`, "/workerDefaults/lease"},
		"Drain":              {`api: {drainSeconds: 0}`, "/api/drainSeconds"},
		"LogLevel":           {`log: {level: loud}`, "/log/level"},
		"ServiceType":        {`service: {type: None}`, "/service/type"},
		"Port":               {`service: {port: 99999}`, "/service/port"},
		"IngressWithoutHost": {`ingress: {hosts: [{path: /}]}`, "/ingress/hosts"},
		"Digest":             {`image: {digest: latest}`, "/image/digest"},
		"Budget":             {`api: {pdb: {maxUnavailable: 0}}`, "/api/pdb"},
		"ToZeroAlone":        {`workers: {default: {autoscaling: {enabled: true, minReplicas: 0}}}`, "scheduler.enabled"},
		"MaxBelowMin":        {`workers: {default: {autoscaling: {enabled: true, minReplicas: 9, maxReplicas: 3}}}`, "below minReplicas"},
		"EnvName":            {`api: {env: [{name: "a b", value: c}]}`, "/api/env"},
	} {
		t.Run(name, func(t *testing.T) {
			values, err := chartutil.ReadValues([]byte(c.values))
			require.NoError(t, err)
			if _, has := values["database"]; !has && name != "NoDatabase" {
				values["database"] = map[string]any{"existingSecret": "pg"}
			}
			_, err = render(values)
			require.ErrorContains(t, err, c.says)
		})
	}
}

// selector is a label selector that must not be empty: that would select all.
func selector(t *testing.T, s *meta.LabelSelector) labels.Selector {
	t.Helper()
	require.NotNil(t, s)
	parsed, err := meta.LabelSelectorAsSelector(s)
	require.NoError(t, err)
	require.False(t, parsed.Empty())
	return parsed
}

// seconds of a Go duration.
func seconds(t *testing.T, text string) int64 {
	t.Helper()
	d, err := time.ParseDuration(text)
	require.NoError(t, err)
	return int64(d.Seconds())
}
