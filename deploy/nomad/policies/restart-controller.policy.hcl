# The rights of the identity of the job oxide-csi-controller for planned restarts
# (docs/explanation/racks-without-hotplug.md): find the client of an instance, and request a restart in its metadata.
#
#   nomad acl policy apply -namespace oxide-csi -job oxide-csi-controller oxide-csi-controller-restart restart-controller.policy.hcl
plugin {
  policy = "read"
}

node {
  policy = "write"
}
