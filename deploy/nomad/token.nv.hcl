# The rack's token, where the job oxide-csi-controller alone can read it. For the monolith the path ends in oxide-csi.
#
#   nomad var put -in=hcl @token.nv.hcl
path = "nomad/jobs/oxide-csi-controller"

items {
  token = "OXIDE-TOKEN"
}
