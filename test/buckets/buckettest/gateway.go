// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckettest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
)

// GatewayProgram returns the path of versitygw, as test/programs/build.sh builds it.
func GatewayProgram() (string, error) {
	programs := os.Getenv("OXIDE_CSI_PROGRAMS")
	if programs == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", err
		}
		programs = filepath.Join(cache, "oxide-csi-plugin", "programs")
	}
	path := filepath.Join(programs, "versitygw")
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("versitygw is not built: run test/programs/build.sh versitygw: %w", err)
	}
	return path, nil
}

// Gateway is a versitygw process on a folder. Its methods are not safe for concurrent use.
type Gateway struct {
	// Endpoint is the URL of the gateway. It stays the same over restarts.
	Endpoint string
	// AccessKey and SecretKey are the root keys.
	AccessKey, SecretKey string
	// Log receives the output of the gateway; nil discards it.
	Log io.Writer

	program, dir, address string
	versions              bool
	process               *exec.Cmd
}

// Region is the region of every gateway.
const Region = "us-east-1"

// startTimeout bounds the start of a gateway or a driver on a busy machine.
const startTimeout = 30 * time.Second

// NewGateway prepares a gateway whose data is below dir. With versions it keeps old versions of objects.
func NewGateway(dir string, versions bool) (*Gateway, error) {
	program, err := GatewayProgram()
	if err != nil {
		return nil, err
	}
	address, err := freeAddress()
	if err != nil {
		return nil, err
	}
	for _, folder := range []string{"buckets", "users", "versions"} {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o700); err != nil {
			return nil, err
		}
	}
	return &Gateway{
		Endpoint: "http://" + address, AccessKey: "ROOT" + rand.Text()[:12], SecretKey: rand.Text() + rand.Text(),
		program: program, dir: dir, address: address, versions: versions,
	}, nil
}

func freeAddress() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return listener.Addr().String(), listener.Close()
}

// Start starts the process and waits until it answers.
func (g *Gateway) Start(ctx context.Context) error {
	args := []string{
		"--port",
		g.address,
		"--health",
		"/health",
		"--quiet",
		"--iam-dir",
		filepath.Join(g.dir, "users"),
		"posix",
	}
	if g.versions {
		args = append(args, "--versioning-dir", filepath.Join(g.dir, "versions"))
	}
	g.process = exec.Command(g.program, append(args, filepath.Join(g.dir, "buckets"))...)
	g.process.Env = append(os.Environ(), "ROOT_ACCESS_KEY="+g.AccessKey, "ROOT_SECRET_KEY="+g.SecretKey)
	g.process.Stdout, g.process.Stderr = g.Log, g.Log
	g.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := g.process.Start(); err != nil {
		return err
	}
	return waitFor(ctx, "the gateway answers", func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, g.Endpoint+"/health", nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			err = errors.New(resp.Status)
		}
		return errors.Join(err, resp.Body.Close())
	})
}

// Kill ends the process with SIGKILL.
func (g *Gateway) Kill() error { return end(g.process, syscall.SIGKILL) }

// Stop ends the process in order.
func (g *Gateway) Stop() error { return end(g.process, syscall.SIGTERM) }

// Folder returns the path of a bucket's folder, or of one in it.
func (g *Gateway) Folder(path ...string) string {
	return filepath.Join(append([]string{g.dir, "buckets"}, path...)...)
}

// Users returns the gateway's file of users, or an empty text if it has none yet.
func (g *Gateway) Users() (string, error) {
	text, err := os.ReadFile(filepath.Join(g.dir, "users", "users.json"))
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	return string(text), err
}

// Root returns an S3 client with the root keys.
func (g *Gateway) Root() *s3.Client { return Client(g.Endpoint, g.AccessKey, g.SecretKey) }

// Client returns an S3 client with keys. It does not retry, so that a refusal comes at once.
func Client(endpoint, accessKey, secretKey string) *s3.Client {
	return s3.New(s3.Options{
		BaseEndpoint: aws.String(endpoint), Region: Region, UsePathStyle: true, Retryer: aws.NopRetryer{},
		Credentials: credentials.NewStaticCredentialsProvider(accessKey, secretKey, ""),
	})
}

// end sends a signal and waits for the end of the process.
func end(process *exec.Cmd, signal syscall.Signal) error {
	if process == nil || process.Process == nil || process.ProcessState != nil {
		return nil
	}
	if err := process.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	err := process.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == signal {
		return nil
	}
	return err
}

// waitFor repeats a check until it succeeds.
func waitFor(ctx context.Context, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waited until %s: %w", what, errors.Join(context.Cause(ctx), err))
		case <-time.After(20 * time.Millisecond):
		}
	}
}
