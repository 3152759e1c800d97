# What the identity of the job oxide-csi-controller may do for planned restarts (docs/explanation/racks-without-hotplug.md): find the client
# that is an instance, and ask in its metadata for a restart.
#
#   nomad acl policy apply -namespace default -job oxide-csi-controller oxide-csi-controller-restart restart-controller.policy.hcl
plugin {
  policy = "read"
}

node {
  policy = "write"
}
