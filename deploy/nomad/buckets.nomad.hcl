# An S3 gateway on a CSI volume. Nomad knows no COSI: make buckets and users with versitygw admin.
#
# Make the volume first, from volumes/create.volume.hcl with id and name "buckets", fs_type "xfs", and owner and group 65534.
# Put the root keys into a variable that jobs of this name may read. So everyone with the capability submit-job in this
# namespace reaches the keys, by a job named "buckets" (docs/explanation/threat-model.md):
#
#   openssl rand -base64 30 | tr -d '\n' | nomad var put -out=none nomad/jobs/buckets access_key=root secret_key=-
#
# Without TLS the gateway is for a network that you trust. For TLS add --cert and --key with absolute paths.

variable "volume" {
  type    = string
  default = "buckets"
}

job "buckets" {
  datacenters = ["*"]

  group "gateway" {
    # Never more: two processes on one volume would overwrite each other's policies and users.
    count = 1

    network {
      port "s3" {
        static = 7070
      }
    }

    volume "data" {
      type            = "csi"
      source          = var.volume
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"

      # The gateway calls no fsync. Without sync a power cut takes objects, keys and buckets that it acknowledged.
      mount_options {
        fs_type     = "xfs"
        mount_flags = ["sync"]
      }
    }

    service {
      name     = "buckets"
      port     = "s3"
      provider = "nomad"

      check {
        type     = "http"
        path     = "/health"
        interval = "10s"
        timeout  = "5s"
      }
    }

    task "versitygw" {
      driver = "docker"
      user   = "65534:65534"

      config {
        image           = "docker.io/versity/versitygw:v1.8.0"
        ports           = ["s3"]
        readonly_rootfs = true
        cap_drop        = ["ALL"]
        entrypoint      = ["/bin/sh", "-c"]
        # The root of the volume would make a bucket of each directory in it.
        args = ["mkdir -p /data/buckets /data/users /data/versions && exec versitygw --port :7070 --health /health --quiet --iam-dir /data/users posix --versioning-dir /data/versions /data/buckets"]
      }

      template {
        destination = "${NOMAD_SECRETS_DIR}/keys.env"
        env         = true
        data        = <<-EOF
          {{ with nomadVar "nomad/jobs/buckets" }}
          ROOT_ACCESS_KEY={{ .access_key }}
          ROOT_SECRET_KEY={{ .secret_key }}
          {{ end }}
        EOF
      }

      volume_mount {
        volume      = "data"
        destination = "/data"
      }

      resources {
        cpu    = 200
        memory = 256
      }
    }
  }
}
