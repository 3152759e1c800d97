// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"

	cosi "sigs.k8s.io/container-object-storage-interface/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Options configure a [Driver].
type Options struct {
	// ClusterID tells the buckets and users of this cluster from those of others in the same store. It is permanent.
	ClusterID string
	Stores    []StoreOptions
	Log       *slog.Logger
}

// Driver answers the RPCs of COSI's Identity and Provisioner, v1alpha1. Errors have their gRPC code as in package rpc.
type Driver struct {
	cosi.UnimplementedIdentityServer
	cosi.UnimplementedProvisionerServer

	cluster string
	stores  map[string]*Store
	log     *slog.Logger
}

var (
	_ cosi.IdentityServer    = (*Driver)(nil)
	_ cosi.ProvisionerServer = (*Driver)(nil)
)

// New returns a driver. It does not connect to the stores. The error joins all problems of the options.
func New(opts Options) (*Driver, error) {
	d := &Driver{cluster: opts.ClusterID, stores: map[string]*Store{}, log: opts.Log}
	var problems []error
	if !clusterID.MatchString(opts.ClusterID) {
		problems = append(problems, fmt.Errorf("cluster ID %q is not 1 to 63 of a-z, 0-9 and '-'", opts.ClusterID))
	}
	if len(opts.Stores) == 0 {
		problems = append(problems, errors.New("no store is configured"))
	}
	for _, options := range opts.Stores {
		store, err := newStore(options)
		switch {
		case err != nil:
			problems = append(problems, err)
		case d.stores[options.Name] != nil:
			problems = append(problems, fmt.Errorf("store %q is configured twice", options.Name))
		default:
			d.stores[options.Name] = store
		}
	}
	return d, errors.Join(problems...)
}

// LockKey names the bucket that a request changes. One operation at a time may run for each key. It is empty if the
// request changes nothing.
func LockKey(req any) string {
	switch r := req.(type) {
	case *cosi.DriverCreateBucketRequest:
		return "bucket " + strconv.Quote(r.GetName())
	case interface{ GetBucketId() string }:
		_, bucket, _ := strings.Cut(r.GetBucketId(), "/")
		return "bucket " + strconv.Quote(bucket)
	}
	return ""
}

// DriverGetInfo returns the driver's name.
func (d *Driver) DriverGetInfo(context.Context, *cosi.DriverGetInfoRequest) (*cosi.DriverGetInfoResponse, error) {
	return &cosi.DriverGetInfoResponse{Name: driverName}, nil
}

// store returns the store that a class or a bucket ID names.
func (d *Driver) store(name string) (*Store, error) {
	if store := d.stores[name]; store != nil {
		return store, nil
	}
	names := strings.Join(slices.Sorted(maps.Keys(d.stores)), ", ")
	if name != "" {
		return nil, rpc.InvalidArgument("store %q is not configured: use one of %s", name, names)
	}
	if len(d.stores) > 1 {
		return nil, rpc.InvalidArgument(
			"parameter %s is missing, and there are several stores: use one of %s",
			ParameterStore,
			names,
		)
	}
	for _, only := range d.stores {
		return only, nil
	}
	return nil, rpc.Internal("no store is configured")
}

func (s *Store) protocol() *cosi.Protocol {
	return &cosi.Protocol{Type: &cosi.Protocol_S3{S3: &cosi.S3{
		Region:           s.region,
		SignatureVersion: cosi.S3SignatureVersion_S3V4,
	}}}
}
