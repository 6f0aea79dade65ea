{{/* Names are fixed, not derived from the release: there can be one Pointsman in a cluster, and people find it by name. */}}

{{- define "pointsman.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: pointsman
{{- end }}

{{/* Takes the component's name. */}}
{{- define "pointsman.selector" -}}
app.kubernetes.io/name: pointsman
app.kubernetes.io/component: {{ . }}
{{- end }}

{{- define "pointsman.image" -}}
{{- $image := get .Values.image .component -}}
{{- printf "%s/%s" .Values.image.registry $image.repository -}}
{{- if $image.digest -}}
{{- printf "@%s" $image.digest -}}
{{- else -}}
{{- printf ":%s" ($image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end }}

{{- define "pointsman.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* The direct addresses of the API servers, comma-separated; empty when nobody says and no cluster can be asked. */}}
{{- define "pointsman.apiServers" -}}
{{- if .Values.apiServer.endpoints -}}
{{- join "," .Values.apiServer.endpoints -}}
{{- else if .Values.apiServer.autoDetect -}}
{{- $slice := lookup "discovery.k8s.io/v1" "EndpointSlice" "default" "kubernetes" -}}
{{- $urls := list -}}
{{- range $port := ($slice.ports | default list) -}}
{{- range $endpoint := ($slice.endpoints | default list) -}}
{{- range $address := $endpoint.addresses -}}
{{- $host := ternary (printf "[%s]" $address) $address (contains ":" $address) -}}
{{- $urls = append $urls (printf "https://%s:%d" $host (int $port.port)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- join "," (sortAlpha $urls) -}}
{{- end -}}
{{- end }}

{{/* A token of one hour that names the pod's node, mounted only where it is needed. */}}
{{- define "pointsman.tokenVolume" -}}
- name: token
  projected:
    defaultMode: 288 # 0440, which YAML 1.1 and 1.2 read differently
    sources:
    - serviceAccountToken: {path: token, expirationSeconds: 3600}
    - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
    - downwardAPI: {items: [{path: namespace, fieldRef: {apiVersion: v1, fieldPath: metadata.namespace}}]}
{{- end }}

{{- define "pointsman.tokenMount" -}}
- {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}

{{/* User name of a component's service account, as admission sees it. */}}
{{- define "pointsman.user" -}}
{{- $account := get (get .Values .component) "serviceAccount" -}}
{{- printf "system:serviceaccount:%s:%s" .Release.Namespace $account.name -}}
{{- end }}

{{/* Contradictions that the schema cannot express. */}}
{{- define "pointsman.check" -}}
{{- if and (not .Values.policies.enabled) (not .Values.policies.acknowledgeUnguarded) -}}
{{- fail "policies.enabled=false lets one stolen agent token rewrite the status of every node, and anybody with ConfigMap rights the rules of any node; set policies.acknowledgeUnguarded=true if that is meant" -}}
{{- end -}}
{{- if has .Release.Namespace (list "default" "kube-system" "kube-public" "kube-node-lease" "pointsman-node-config") -}}
{{- fail (printf "install Pointsman into a namespace of its own (-n pointsman-system --create-namespace), not into %s" .Release.Namespace) -}}
{{- end -}}
{{- if eq .Values.agent.serviceAccount.name .Values.operator.serviceAccount.name -}}
{{- fail "agent.serviceAccount.name and operator.serviceAccount.name must differ: the admission policies tell agents and operator apart by it" -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.service.enabled) -}}
{{- fail "metrics.serviceMonitor.enabled needs metrics.service.enabled: a ServiceMonitor selects Services" -}}
{{- end -}}
{{- $metricsPort := dig "proxy" "metricsPort" .Values.metrics.service.agentPort .Values.defaultConfiguration.spec -}}
{{- if and .Values.metrics.service.enabled .Values.defaultConfiguration.create (ne (int $metricsPort) (int .Values.metrics.service.agentPort)) -}}
{{- fail (printf "metrics.service.agentPort is %d, but defaultConfiguration.spec.proxy.metricsPort is %d" (int .Values.metrics.service.agentPort) (int $metricsPort)) -}}
{{- end -}}
{{- end }}
