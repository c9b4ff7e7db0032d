{{/* The pod of an engine. Its argument is a dict: top (the root context), role, config (JSON for vLLM). */}}
{{- define "kvxfer.engine" -}}
{{- $top := .top }}
{{- $engines := $top.Values.engines }}
{{- $own := index $engines .role }}
metadata:
  labels: {{- include "kvxfer.selector" (list $top .role) | nindent 4 }}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add $engines.drainSeconds 30 }}
  # The engine's agents and the node's daemon run as one user: sockets and shared memory require that.
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ $top.Values.daemon.user }}
    runAsGroup: {{ $top.Values.daemon.user }}
    fsGroup: {{ $top.Values.daemon.user }}
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: engine
      image: {{ $engines.image | quote }}
      args:
        - --model={{ $engines.model }}
        - --port={{ $engines.port }}
        - {{ printf "--kv-transfer-config=%s" .config | quote }}
        {{- range $engines.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      env:
        - {name: KVXFER_DAEMON_DIR, value: /run/kvxfer}
        - {name: KVXFER_SECRET_FILE, value: /etc/kvxfer/agents/secret}
        # Where the engine's own agents listen.
        - {name: KVXFER_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        {{- with $engines.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: http, containerPort: {{ $engines.port }}}
        - {name: agent, containerPort: {{ $engines.agentPort }}}
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        failureThreshold: 240
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 15
        failureThreshold: 4
      # The pod waits: routers stop sending it requests, and decode fetches the blocks that it has handed over.
      lifecycle: {preStop: {exec: {command: [sleep, {{ $engines.drainSeconds | quote }}]}}}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities: {drop: [ALL]}
      resources: {{- toYaml $own.resources | nindent 8 }}
      volumeMounts:
        - {name: runtime, mountPath: /run/kvxfer}
        - {name: shm, mountPath: /dev/shm}
        - {name: agents, mountPath: /etc/kvxfer/agents, readOnly: true}
  volumes:
    - {name: runtime, hostPath: {path: {{ $top.Values.daemon.runtimeFolder }}, type: DirectoryOrCreate}}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $engines.shmSize }}}}
    - {name: agents, secret: {secretName: {{ $top.Values.secrets.agents }}, defaultMode: 0440}}
{{- end }}
