// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build nomad

package nomad_test

import (
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
)

const (
	// gatewayImage is what deploy/nomad/buckets.nomad.hcl names.
	gatewayImage   = "docker.io/versity/versitygw:v1.8.0"
	gatewayAddress = "127.0.0.1:7070"
	bucketsVolume  = "buckets"
)

// gatewayImages makes an image of the gateway with a shell, as the released one has, and loads it on the clients.
func (c *cluster) gatewayImages(t *testing.T) {
	t.Helper()
	root := filepath.Join(c.dir, "gateway")
	must(t, os.MkdirAll(filepath.Join(root, "bin"), 0o755))
	busybox, err := exec.LookPath("busybox")
	must(t, err)
	c.copy(busybox, filepath.Join(root, "bin", "busybox"))
	for _, name := range []string{"sh", "mkdir"} {
		must(t, os.Symlink("busybox", filepath.Join(root, "bin", name)))
	}
	c.copy(program(t, "versitygw"), filepath.Join(root, "bin", "versitygw"))
	c.output(t, "tar", "--create", "--file="+root+".tar", "--directory="+root, "bin")
	for _, name := range nodes {
		c.clients[name].docker(t, "import", root+".tar", gatewayImage)
	}
}

// buckets runs the job of an S3 gateway on one client and then on the other. The objects move with the volume.
func (c *cluster) buckets(t *testing.T, operator cli) {
	c.gatewayImages(t)
	secret := rand.Text()
	c.as(c.management).
		run(t, "var", "put", "-out=none", "nomad/jobs/buckets", "access_key=root", "secret_key="+secret)
	operator.run(t, "volume", "create",
		c.filled(t, "volumes/create.volume.hcl", `"data"`, `"`+bucketsVolume+`"`, `"ext4"`, `"xfs"`))
	endpoint, bucket, key := "http://"+gatewayAddress, aws.String("backups"), aws.String("folder/object")
	client := s3.New(s3.Options{
		BaseEndpoint: &endpoint, Region: "us-east-1", UsePathStyle: true,
		Credentials: credentials.NewStaticCredentialsProvider("root", secret, ""),
	})
	for i, name := range nodes {
		operator.run(t, "job", "run", "-detach", c.gatewayJob(t, name))
		await.Within(t, waitLimit, "the gateway answers on "+name, func() bool {
			_, err := client.ListBuckets(t.Context(), &s3.ListBucketsInput{})
			return err == nil
		})
		if i == 0 {
			_, err := client.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: bucket})
			must(t, err)
			_, err = client.PutObject(
				t.Context(),
				&s3.PutObjectInput{Bucket: bucket, Key: key, Body: strings.NewReader("all the data")},
			)
			must(t, err)
		}
		object, err := client.GetObject(t.Context(), &s3.GetObjectInput{Bucket: bucket, Key: key})
		must(t, err)
		text, err := io.ReadAll(object.Body)
		must(t, err)
		must(t, object.Body.Close())
		if string(text) != "all the data" {
			t.Errorf("on %s the object is %q", name, text)
		}
		operator.run(t, "job", "stop", "-detach", "buckets")
		c.released(t, bucketsVolume)
	}
	operator.run(t, "volume", "delete", bucketsVolume)
}

// gatewayJob returns the gateway's job file for one client. The clients' Docker has no networks of its own, so the
// gateway listens on this machine's loopback interface.
func (c *cluster) gatewayJob(t *testing.T, client string) string {
	t.Helper()
	return c.filled(t, "buckets.nomad.hcl",
		`  group "gateway" {`, fmt.Sprintf(`  constraint {
    attribute = "${node.unique.name}"
    value     = %q
  }

  group "gateway" {`, client),
		`ports           = ["s3"]`, `network_mode    = "host"`,
		"--port :7070", "--port "+gatewayAddress)
}
