// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command registrar registers a CSI plugin with the kubelet. It stands in for node-driver-registrar, which is not in
// the Go module proxy: it has the same flags as in the manifests, does what the kubelet needs, and removes its socket
// on SIGTERM (node-driver-registrar v2.16.0, cmd/csi-node-driver-registrar/node_register.go).
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

func main() {
	socket := flag.String("csi-address", "", "the plugin's socket")
	forKubelet := flag.String("kubelet-registration-path", "", "the same socket's path in the kubelet's view")
	flag.Parse()
	if err := run(*socket, *forKubelet); err != nil {
		fmt.Fprintf(os.Stderr, "registrar: %v\n", err)
		os.Exit(1)
	}
}

func run(socket, forKubelet string) error {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	info, err := csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("GetPluginInfo: %w", err)
	}
	path := filepath.Join("/registration", info.GetName()+"-reg.sock")
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, plugin{name: info.GetName(), endpoint: forKubelet})
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM)
	go func() {
		<-signals
		server.Stop() // it closes the listener, which removes the socket
	}()
	return server.Serve(listener)
}

type plugin struct {
	registration.UnimplementedRegistrationServer
	name, endpoint string
}

func (p plugin) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type:              registration.CSIPlugin,
		Name:              p.name,
		Endpoint:          p.endpoint,
		SupportedVersions: []string{"1.0.0"},
	}, nil
}

// NotifyRegistrationStatus ends the process if the kubelet refuses the plugin, so that the registration is repeated.
func (p plugin) NotifyRegistrationStatus(
	_ context.Context,
	status *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	if !status.GetPluginRegistered() {
		fmt.Fprintf(os.Stderr, "registrar: kubelet refuses the plugin: %s\n", status.GetError())
		os.Exit(1)
	}
	return &registration.RegistrationStatusResponse{}, nil
}
