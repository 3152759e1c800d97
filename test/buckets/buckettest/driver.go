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
	"syscall"

	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cosi "sigs.k8s.io/container-object-storage-interface/proto"
)

// Store is one store of a driver.
type Store struct {
	Name, Endpoint       string
	AccessKey, SecretKey string
}

// Driver is an oxide-cosi process, and a client of its socket.
type Driver struct {
	cosi.IdentityClient
	cosi.ProvisionerClient
	// Log receives the output of the driver; nil discards it.
	Log io.Writer

	program, dir, cluster string
	process               *exec.Cmd
	conn                  *grpc.ClientConn
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
	return &Driver{program: program, dir: dir, cluster: cluster}, nil
}

// Start starts the process and waits until it answers.
func (d *Driver) Start(ctx context.Context) error {
	socket := "unix://" + filepath.Join(d.dir, "cosi.sock")
	d.process = exec.Command(d.program, "--cluster-id", d.cluster, "--stores", filepath.Join(d.dir, "stores.yaml"))
	d.process.Env = append(os.Environ(), "COSI_ENDPOINT="+socket)
	d.process.Stdout, d.process.Stderr = d.Log, d.Log
	d.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := d.process.Start(); err != nil {
		return err
	}
	var err error
	if d.conn, err = grpc.NewClient(socket, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		return err
	}
	d.IdentityClient, d.ProvisionerClient = cosi.NewIdentityClient(d.conn), cosi.NewProvisionerClient(d.conn)
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	_, err = d.DriverGetInfo(ctx, &cosi.DriverGetInfoRequest{}, grpc.WaitForReady(true))
	return err
}

// Kill ends the process with SIGKILL.
func (d *Driver) Kill() error { return d.end(syscall.SIGKILL) }

// Stop ends the process in order.
func (d *Driver) Stop() error { return d.end(syscall.SIGTERM) }

func (d *Driver) end(signal syscall.Signal) error {
	var err error
	if d.conn != nil {
		err = d.conn.Close()
		d.conn = nil
	}
	return errors.Join(err, end(d.process, signal))
}
