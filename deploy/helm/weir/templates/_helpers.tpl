{{- define "weir.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough for what is added to it: names and labels end at 63. */}}
{{- define "weir.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 36 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "weir.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 36 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 36 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What selects pods. It must never change: selectors cannot. Takes root, component and, for a worker, pool. */}}
{{- define "weir.selectorLabels" -}}
app.kubernetes.io/name: {{ include "weir.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with get . "pool" }}
weir.run/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "weir.labels" -}}
{{ include "weir.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "weir.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "weir.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "weir.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Fails early, with words, where an install would fail late. */}}
{{- define "weir.check" -}}
{{- $d := .Values.database -}}
{{- if and (not $d.existingSecret) (not $d.url) -}}
{{- fail "set database.existingSecret (a secret with the database's URL) or database.url" -}}
{{- end -}}
{{- if and $d.existingSecret (or $d.url $d.directUrl) -}}
{{- fail "set only one of database.existingSecret and database.url" -}}
{{- end -}}
{{- range $name, $_ := .Values.workers -}}
{{- $pool := fromYaml (include "weir.pool" (dict "root" $ "name" $name)) -}}
{{- if and $pool.autoscaling.enabled (eq (int $pool.autoscaling.minReplicas) 0) (not $.Values.scheduler.enabled) -}}
{{- fail (printf "workers.%s may scale to 0: then scheduler.enabled must be true, or nobody wakes what waits" $name) -}}
{{- end -}}
{{- if and $pool.autoscaling.enabled (lt (int $pool.autoscaling.maxReplicas) (int $pool.autoscaling.minReplicas)) -}}
{{- fail (printf "workers.%s.autoscaling: maxReplicas is below minReplicas" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The settings of one pool: its own over workerDefaults. */}}
{{- define "weir.pool" -}}
{{- toYaml (mustMergeOverwrite (deepCopy .root.Values.workerDefaults) (deepCopy (default dict (get .root.Values.workers .name)))) -}}
{{- end -}}

{{/* The secret with the database's URL. Takes root and, for hooks, which run before the chart's own secret is made, hook. */}}
{{- define "weir.databaseSecret" -}}
{{- if .root.Values.database.existingSecret -}}
{{- .root.Values.database.existingSecret -}}
{{- else -}}
{{- include "weir.fullname" .root }}-{{ if get . "hook" }}migrate{{ else }}database{{ end -}}
{{- end -}}
{{- end -}}

{{- define "weir.urlKey" -}}
{{- if .Values.database.existingSecret }}{{ .Values.database.urlKey }}{{ else }}url{{ end -}}
{{- end -}}

{{/* Empty when there is no pooler. */}}
{{- define "weir.directUrlKey" -}}
{{- if .Values.database.existingSecret }}{{ .Values.database.directUrlKey }}{{ else if .Values.database.directUrl }}directUrl{{ end -}}
{{- end -}}

{{- define "weir.databaseEnv" -}}
- name: WEIR_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "weir.databaseSecret" . }}
      key: {{ include "weir.urlKey" .root }}
{{- with include "weir.directUrlKey" .root }}
- name: WEIR_DATABASE_URL_DIRECT
  valueFrom:
    secretKeyRef:
      name: {{ include "weir.databaseSecret" $ }}
      key: {{ . }}
{{- end }}
{{- end -}}

{{/* GOMEMLIMIT: nine tenths of the memory limit, so that Go collects before the kernel kills. */}}
{{- define "weir.memoryLimitEnv" -}}
{{- $memory := dig "limits" "memory" "" . | toString -}}
{{- if regexMatch "^[0-9]+Gi$" $memory }}
- name: GOMEMLIMIT
  value: {{ printf "%dMiB" (div (mul (trimSuffix "Gi" $memory | int64) 1024 9) 10) }}
{{- else if regexMatch "^[0-9]+Mi$" $memory }}
- name: GOMEMLIMIT
  value: {{ printf "%dMiB" (div (mul (trimSuffix "Mi" $memory | int64) 9) 10) }}
{{- end }}
{{- end -}}

{{/* The metadata and spec of a role's pods. Takes root, component, pool, role (its values), port, portName, args, preStopSeconds. */}}
{{- define "weir.podTemplate" -}}
{{- $root := .root -}}
{{- $labels := dict "root" $root "component" .component "pool" (get . "pool") -}}
metadata:
  labels:
    {{- include "weir.labels" $labels | nindent 4 }}
    {{- with .role.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: weir
    {{- if $root.Values.config }}
    checksum/config: {{ toYaml $root.Values.config | sha256sum }}
    {{- end }}
    {{- if not $root.Values.database.existingSecret }}
    checksum/database: {{ printf "%s %s" $root.Values.database.url $root.Values.database.directUrl | sha256sum }}
    {{- end }}
    {{- with .role.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "weir.serviceAccountName" $root }}
  automountServiceAccountToken: false
  # A service called weir would otherwise put WEIR_ variables of its own here.
  enableServiceLinks: false
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  # The drain, the last commits and answers after it, and what comes before it.
  terminationGracePeriodSeconds: {{ add .role.drainSeconds 20 (default 0 (get . "preStopSeconds")) }}
  {{- with .role.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  containers:
    - name: weir
      image: {{ include "weir.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        {{- toYaml .args | nindent 8 }}
        - --drain={{ .role.drainSeconds }}s
        - --log-level={{ $root.Values.log.level }}
        - --log-format={{ $root.Values.log.format }}
        {{- if $root.Values.config }}
        - --config=/etc/weir/weir.yaml
        {{- end }}
      env:
        {{- include "weir.databaseEnv" (dict "root" $root) | nindent 8 }}
        {{- include "weir.memoryLimitEnv" .role.resources | nindent 8 }}
        {{- with concat $root.Values.extraEnv .role.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with concat $root.Values.extraEnvFrom .role.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - name: {{ .portName }}
          containerPort: {{ .port }}
      {{- with get . "preStopSeconds" }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ . }}}
      {{- end }}
      # A process waits up to 30 s for its database before it listens.
      startupProbe:
        httpGet: {path: /livez, port: {{ .portName }}}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 30
      # Does not ask the database: a restart would not bring it back.
      livenessProbe:
        httpGet: {path: /livez, port: {{ .portName }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      # Asks the database, for 2 s at most.
      readinessProbe:
        httpGet: {path: /readyz, port: {{ .portName }}}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      resources:
        {{- toYaml .role.resources | nindent 8 }}
      securityContext:
        {{- toYaml $root.Values.securityContext | nindent 8 }}
      {{- if or $root.Values.config $root.Values.extraVolumeMounts }}
      volumeMounts:
        {{- if $root.Values.config }}
        - {name: config, mountPath: /etc/weir, readOnly: true}
        {{- end }}
        {{- with $root.Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
  {{- if or $root.Values.config $root.Values.extraVolumes }}
  volumes:
    {{- if $root.Values.config }}
    - name: config
      configMap: {name: {{ include "weir.fullname" $root }}-config}
    {{- end }}
    {{- with $root.Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- if .role.topologySpread }}
  topologySpreadConstraints:
    {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
    - topologyKey: {{ . }}
      maxSkew: 1
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "weir.selectorLabels" $labels | nindent 10 }}
      # Old pods of a rollout do not count.
      matchLabelKeys: [pod-template-hash]
    {{- end }}
  {{- end }}
  {{- with .role.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .role.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .role.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* A PodDisruptionBudget. Takes root, component, pool, name, pdb. */}}
{{- define "weir.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels:
    {{- include "weir.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .pdb.maxUnavailable }}
  # A pod that is not ready must not keep its node from being drained.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "weir.selectorLabels" . | nindent 6 }}
{{- end -}}
