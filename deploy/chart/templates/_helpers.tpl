{{- define "kvxfer.labels" -}}
app.kubernetes.io/name: kvxfer
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Takes a context and a component. */}}
{{- define "kvxfer.selector" -}}
app.kubernetes.io/name: kvxfer
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "kvxfer.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kvxfer.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
{{- end }}
