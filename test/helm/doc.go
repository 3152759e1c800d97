// Package helm renders the chart of deploy/helm with helm, and holds it equal to the manifests of deploy/k8s, to what the plugin
// understands, and to what an API server takes.
//
// What needs helm has the build tag "helm", since building it takes minutes once: make test-helm.
package helm
