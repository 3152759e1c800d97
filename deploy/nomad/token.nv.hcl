# The rack's token, at a path that only the job oxide-csi-controller can read. For the monolith the path ends in
# oxide-csi.
#
#   nomad var put -in=hcl @token.nv.hcl
path = "nomad/jobs/oxide-csi-controller"

items {
  token = "OXIDE-TOKEN"
}
