{{/* Labels of every object. */}}
{{- define "oxide-csi.labels" -}}
app.kubernetes.io/name: oxide-csi-driver
{{- end }}

{{/* The plugin's image: {repository, root}. */}}
{{- define "oxide-csi.image" -}}
image: {{ printf "%s:%s" .repository (.root.Values.image.tag | default .root.Chart.AppVersion) }}
{{- with .root.Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* A sidecar's image: {image, root}. */}}
{{- define "oxide-csi.sidecarImage" -}}
image: {{ .image }}
{{- with .root.Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* Variables of the plugin that values name, in order of their names. */}}
{{- define "oxide-csi.env" -}}
{{- range $i, $name := keys . | sortAlpha }}
{{- if $i }}{{ "\n" }}{{ end -}}
- name: {{ $name }}
  value: {{ get $ $name | quote }}
{{- end }}
{{- end }}

{{/* A container that may do nothing. */}}
{{- define "oxide-csi.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Whether the process answers, not whether the rack does, nor whether it knows who it is: a restart mends neither. */}}
{{- define "oxide-csi.probes" -}}
livenessProbe:
  httpGet:
    path: /livez
    port: http
  periodSeconds: 30
  timeoutSeconds: 10
  failureThreshold: 20
readinessProbe:
  httpGet:
    path: /readyz
    port: http
  periodSeconds: 10
  timeoutSeconds: 5
{{- end }}

{{/* What automountServiceAccountToken would put into every container: the mode of its files. */}}
{{- define "oxide-csi.kubernetesVolume" -}}
- name: kubernetes
  projected:
    defaultMode: {{ . }}
    sources:
      - serviceAccountToken:
          path: token
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                fieldPath: metadata.namespace
{{- end }}

{{- define "oxide-csi.kubernetesMount" -}}
- name: kubernetes
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- end }}

{{/* The cluster-id in a Secret, where helm can see it: {name, namespace}. */}}
{{- define "oxide-csi.clusterIDIn" -}}
{{- lookup "v1" "Secret" .namespace .name | dig "data" "cluster-id" "" | b64dec }}
{{- end }}

{{/* The cluster ID, or nothing where it is to be read from the Secret. */}}
{{- define "oxide-csi.clusterID" -}}
{{- if .Values.clusterID }}
{{- .Values.clusterID }}
{{- else if or .Values.racks (not (include "oxide-csi.clusterIDIn" (dict "name" .Values.secretName "namespace" .Release.Namespace))) }}
{{- lookup "v1" "Namespace" "" "kube-system" | dig "metadata" "uid" "" }}
{{- end }}
{{- end }}

{{/* The cluster ID with which the controller runs, where helm can see it. */}}
{{- define "oxide-csi.clusterIDBefore" -}}
{{- range lookup "apps/v1" "Deployment" .Release.Namespace "oxide-csi-controller" | dig "spec" "template" "spec" "containers" list }}
{{- range .env }}
{{- if eq .name "OXIDE_CSI_CLUSTER_ID" }}
{{- .value | default (include "oxide-csi.clusterIDIn" (dict "name" (dig "valueFrom" "secretKeyRef" "name" "" .) "namespace" $.Release.Namespace)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Disks belong to the cluster ID that they were made with: another one would leave all of them behind. */}}
{{- define "oxide-csi.keepClusterID" -}}
{{- $before := include "oxide-csi.clusterIDBefore" . }}
{{- $after := include "oxide-csi.clusterID" . | default (include "oxide-csi.clusterIDIn" (dict "name" .Values.secretName "namespace" .Release.Namespace)) }}
{{- if and $before $after (ne $before $after) }}
{{- fail (printf "the cluster ID is %s, and would become %s: the disks of this cluster would be left behind; set clusterID to %s" $before $after $before) }}
{{- end }}
{{- end }}

{{/* The configuration file: what several racks need, and nothing else. */}}
{{- define "oxide-csi.config" -}}
racks:
{{- range .Values.racks }}
- name: {{ .name | quote }}
  host: {{ .host | quote }}
  project: {{ .project | quote }}
  tokenFile: /etc/oxide-csi/token/{{ .name }}
  {{- if .ca }}
  caFile: /etc/oxide-csi/config/{{ .name }}.pem
  {{- end }}
{{- end }}
{{- end }}

{{/* Pods are made anew when the configuration file changes, which is read at start. */}}
{{- define "oxide-csi.configChecksum" -}}
{{- if .Values.racks -}}
checksum/config: {{ print (include "oxide-csi.config" .) (.Values.racks | toJson) | sha256sum }}
{{- end }}
{{- end }}

{{/* Where pods may run: {of: controller or node, root}. */}}
{{- define "oxide-csi.placement" -}}
priorityClassName: {{ .of.priorityClassName }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $field := list "tolerations" "nodeSelector" "affinity" }}
{{- with get $.of $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* What the sidecars of the controller have in common: {port, number, root}. */}}
{{- define "oxide-csi.sidecar" -}}
ports:
  - name: {{ .port }}
    containerPort: {{ .number }}
livenessProbe:
  httpGet:
    path: /healthz/leader-election
    port: {{ .port }}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
resources:
  {{- toYaml .root.Values.sidecars.resources | nindent 2 }}
securityContext:
  {{- include "oxide-csi.confined" . | nindent 2 }}
volumeMounts:
  - name: socket-dir
    mountPath: /csi
  {{- include "oxide-csi.kubernetesMount" . | nindent 2 }}
{{- end }}

{{/* How Kubernetes is asked for the Node. */}}
{{- define "oxide-csi.nodeNameEnv" -}}
- name: OXIDE_CSI_NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- with .Values.node.rackLabel }}
- name: OXIDE_CSI_RACK_LABEL
  value: {{ . | quote }}
{{- end }}
{{- end }}
