// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckettest

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"
)

// Store is one store of a driver.
type Store struct {
	Name, Endpoint       string
	AccessKey, SecretKey string
}

// Driver is an oxide-cosi process, and a client of its socket. The client goes on after [Driver.Kill] and
// [Driver.Start], which are not safe for concurrent use.
type Driver struct {
	cosi.IdentityClient
	cosi.ProvisionerClient
	// Log receives the output of the driver; nil discards it.
	Log io.Writer
	// Settle is how long the driver waits after a kill; 0 is its default.
	Settle time.Duration

	program, dir, cluster, socket string
	process                       *exec.Cmd
	conn                          *grpc.ClientConn
}

// NewDriver writes the configuration of a driver below dir. The program is oxide-cosi.
func NewDriver(program, dir, cluster string, stores ...Store) (*Driver, error) {
	var file struct {
		Stores []map[string]string `yaml:"stores"`
	}
	for _, store := range stores {
		keys := filepath.Join(dir, "keys-"+store.Name)
		if err := os.MkdirAll(keys, 0o700); err != nil {
			return nil, err
		}
		for name, value := range map[string]string{"access-key": store.AccessKey, "secret-key": store.SecretKey} {
			if err := os.WriteFile(filepath.Join(keys, name), []byte(value+"\n"), 0o600); err != nil {
				return nil, err
			}
		}
		file.Stores = append(file.Stores, map[string]string{
			"name": store.Name, "endpoint": store.Endpoint, "keysFolder": filepath.Base(keys),
		})
	}
	text, err := yaml.Marshal(file)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "stores.yaml"), text, 0o600); err != nil {
		return nil, err
	}
	socket := "unix://" + filepath.Join(dir, "cosi.sock")
	conn, err := grpc.NewClient(socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay:  20 * time.Millisecond,
				Multiplier: 1.5,
				MaxDelay:   200 * time.Millisecond,
			},
			MinConnectTimeout: 20 * time.Second, // else 20 milliseconds
		}))
	if err != nil {
		return nil, err
	}
	return &Driver{
		IdentityClient: cosi.NewIdentityClient(conn), ProvisionerClient: cosi.NewProvisionerClient(conn),
		program: program, dir: dir, cluster: cluster, socket: socket, conn: conn,
	}, nil
}

// Start starts the process and waits until it answers.
func (d *Driver) Start(ctx context.Context) error {
	args := []string{"--cluster-id", d.cluster, "--stores", filepath.Join(d.dir, "stores.yaml")}
	if d.Settle != 0 {
		args = append(args, "--settle", d.Settle.String())
	}
	d.process = exec.Command(d.program, args...)
	d.process.Env = append(os.Environ(), "COSI_ENDPOINT="+d.socket)
	d.process.Stdout, d.process.Stderr = d.Log, d.Log
	d.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := d.process.Start(); err != nil {
		return err
	}
	// The client may meet the end of its connection to an earlier process first.
	return waitFor(ctx, "the driver answers", func(ctx context.Context) error {
		_, err := d.DriverGetInfo(ctx, &cosi.DriverGetInfoRequest{}, grpc.WaitForReady(true))
		return err
	})
}

// Socket returns the path of the driver's socket.
func (d *Driver) Socket() string { return strings.TrimPrefix(d.socket, "unix://") }

// Kill ends the process with SIGKILL.
func (d *Driver) Kill() error { return end(d.process, syscall.SIGKILL) }

// Stop closes the client and ends the process in order.
func (d *Driver) Stop() error { return errors.Join(d.conn.Close(), end(d.process, syscall.SIGTERM)) }
