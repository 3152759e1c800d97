# The additional rights of the identity of the job oxide-csi-node for planned restarts
# (docs/explanation/racks-without-hotplug.md): reply in the metadata of its client. Nomad has no right for a single
# client, so the job may change the metadata of any client.
#
#   nomad acl policy apply -namespace oxide-csi -job oxide-csi-node oxide-csi-node-restart restart-node.policy.hcl
plugin {
  policy = "read"
}

node {
  policy = "write"
}
