{{/* Labels of every object. */}}
{{- define "oxide-csi.labels" -}}
app.kubernetes.io/name: oxide-csi-driver
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of pods: {component, of, root}, and app if it is not that of the component. No version: a new version of the chart alone replaces no pod. */}}
{{- define "oxide-csi.podLabels" -}}
app: {{ .app | default (print "oxide-csi-" .component) | quote }}
app.kubernetes.io/name: oxide-csi-driver
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .of.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The plugin's image: {repository, digest, root}. */}}
{{- define "oxide-csi.image" -}}
{{- if .digest -}}
image: {{ printf "%s@%s" .repository .digest | quote }}
{{- else -}}
image: {{ printf "%s:%s" .repository (.root.Values.image.tag | default .root.Chart.AppVersion) | quote }}
{{- end }}
{{- with .root.Values.image.pullPolicy }}
imagePullPolicy: {{ . | quote }}
{{- end }}
{{- end }}

{{/* A sidecar's image: {image, root}. */}}
{{- define "oxide-csi.sidecarImage" -}}
image: {{ .image | quote }}
{{- with .root.Values.image.pullPolicy }}
imagePullPolicy: {{ . | quote }}
{{- end }}
{{- end }}

{{/* The plugin's environment variables from the values, sorted by name. */}}
{{- define "oxide-csi.env" -}}
{{- range $i, $name := keys . | sortAlpha }}
{{- if $i }}{{ "\n" }}{{ end -}}
- name: {{ $name | quote }}
  value: {{ get $ $name | quote }}
{{- end }}
{{- end }}

{{/* Not empty if the free capacity of the racks is published. */}}
{{- define "oxide-csi.storageCapacity" -}}
{{- $set := .Values.csiDriver.storageCapacity -}}
{{- if kindIs "invalid" $set }}{{ $set = gt (len .Values.racks) 1 }}{{ end -}}
{{- if $set }}true{{ end -}}
{{- end }}

{{/* The security context of a container without privileges. */}}
{{- define "oxide-csi.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/*
Liveness checks only that the plugin answers on its socket. A restart would neither repair a rack nor find the instance. A
plugin that hangs is restarted within two minutes: after three probes and the time to end.
*/}}
{{- define "oxide-csi.liveness" -}}
livenessProbe:
  httpGet:
    path: /livez
    port: http
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
  terminationGracePeriodSeconds: 30
{{- end }}

{{/* The files that automountServiceAccountToken would mount into every container. The argument is their mode. */}}
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

{{/* The cluster-id in a Secret, if helm can read it: {name, namespace}. */}}
{{- define "oxide-csi.clusterIDIn" -}}
{{- lookup "v1" "Secret" .namespace .name | dig "data" "cluster-id" "" | b64dec }}
{{- end }}

{{/* The cluster ID, or nothing if the plugin reads it from the Secret. */}}
{{- define "oxide-csi.clusterID" -}}
{{- if .Values.clusterID }}
{{- .Values.clusterID }}
{{- else if not (include "oxide-csi.clusterIDIn" (dict "name" .Values.secretName "namespace" .Release.Namespace)) }}
{{- lookup "v1" "Namespace" "" "kube-system" | dig "metadata" "uid" "" }}
{{- end }}
{{- end }}

{{/* The value of an environment variable with the cluster ID. */}}
{{- define "oxide-csi.clusterIDValue" -}}
{{- with include "oxide-csi.clusterID" . -}}
value: {{ . | quote }}
{{- else -}}
valueFrom:
  secretKeyRef:
    name: {{ .Values.secretName | quote }}
    key: cluster-id
{{- end }}
{{- end }}

{{/* The environment variable with the cluster ID of the installed controller, or {} if helm cannot read it. */}}
{{- define "oxide-csi.clusterIDBefore" -}}
{{- $before := dict }}
{{- range lookup "apps/v1" "Deployment" .Release.Namespace "oxide-csi-controller" | dig "spec" "template" "spec" "containers" list }}
{{- range .env }}
{{- if eq .name "OXIDE_CSI_CLUSTER_ID" }}
{{- $before = . }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $before }}
{{- end }}

{{/* Disks belong to the cluster ID that created them. A new cluster ID would orphan all of them. */}}
{{- define "oxide-csi.keepClusterID" -}}
{{- $variable := include "oxide-csi.clusterIDBefore" . | fromJson }}
{{- $secret := dig "valueFrom" "secretKeyRef" "name" "" $variable }}
{{- $before := $variable.value }}
{{- if $secret }}
{{- $before = include "oxide-csi.clusterIDIn" (dict "name" $secret "namespace" .Release.Namespace) }}
{{- end }}
{{- $after := include "oxide-csi.clusterID" . | default (include "oxide-csi.clusterIDIn" (dict "name" .Values.secretName "namespace" .Release.Namespace)) }}
{{- if and $before $after (ne $before $after) }}
{{- fail (printf "the cluster ID would change from %s to %s, which would orphan the disks of this cluster; set clusterID to %s" $before $after $before) }}
{{- end }}
{{- if and $secret (not $before) (not .Values.clusterID) }}
{{- fail (printf "the installed controller has its cluster ID from the Secret %s, which holds no cluster-id any more; put it back, or set clusterID to that ID: the descriptions of this cluster's disks show it" $secret) }}
{{- end }}
{{- end }}

{{/* The configuration file. It is used only for the list of racks. */}}
{{- define "oxide-csi.config" -}}
racks:
{{- range .Values.racks }}
- name: {{ .name | quote }}
  host: {{ .host | quote }}
  project: {{ .project | quote }}
  tokenFile: {{ printf "/etc/oxide-csi/token/%s" .name | quote }}
  {{- if .ca }}
  caFile: {{ printf "/etc/oxide-csi/config/%s.pem" .name | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/*
Annotations of the plugin's pods: {of: controller or node, root}. The plugin reads the configuration file only at start, so
pods are replaced when the file changes.
*/}}
{{- define "oxide-csi.podAnnotations" -}}
{{- $own := dict "kubectl.kubernetes.io/default-container" "oxide-plugin" }}
{{- if .root.Values.racks }}
{{- $_ := set $own "checksum/config" (print (include "oxide-csi.config" .root) (.root.Values.racks | toJson) | sha256sum) }}
{{- end }}
{{- merge dict .of.podAnnotations $own | toYaml }}
{{- end }}

{{/* The COSI driver's file of stores. */}}
{{- define "oxide-csi.stores" -}}
stores:
{{- range .Values.buckets.stores }}
  - name: {{ .name | quote }}
    endpoint: {{ printf "https://oxide-buckets-%s.%s.svc:7070" .name $.Release.Namespace | quote }}
    caFile: {{ printf "/etc/oxide-cosi/stores/%s/tls/ca.crt" .name | quote }}
    keysFolder: {{ printf "/etc/oxide-cosi/stores/%s/keys" .name | quote }}
{{- end }}
{{- end }}

{{/* Scheduling of pods: {of: controller, node, or a part of buckets, root}. */}}
{{- define "oxide-csi.placement" -}}
{{- with .of.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
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

{{/* The common part of the controller's sidecars: {port, number, of}. */}}
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
  {{- toYaml .of.resources | nindent 2 }}
securityContext:
  {{- include "oxide-csi.confined" . | nindent 2 }}
volumeMounts:
  - name: socket-dir
    mountPath: /csi
  {{- include "oxide-csi.kubernetesMount" . | nindent 2 }}
{{- end }}

{{/* Settings for reading the Node from Kubernetes. */}}
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
