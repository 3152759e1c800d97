# What the identity of the job oxide-csi-node may do besides for planned restarts (docs/explanation/racks-without-hotplug.md): answer in the
# metadata of its client. Nomad has no right that is for one client only: with it the job may change any.
#
#   nomad acl policy apply -namespace default -job oxide-csi-node oxide-csi-node-restart restart-node.policy.hcl
plugin {
  policy = "read"
}

node {
  policy = "write"
}
