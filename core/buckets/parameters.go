// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckets

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Parameters of a BucketClass. The operator writes them. The CO passes them to DriverCreateBucket, and COSI's sidecar
// also as the delete context to DriverDeleteBucket.
const (
	// ParameterStore names the store. It may be left out if there is one store only.
	ParameterStore = "store"
	// ParameterVersioning keeps old versions of objects: "true" or "false" (default).
	ParameterVersioning = "versioning"
	// ParameterObjectLock allows locks on objects: "true" or "false" (default). It includes versioning.
	ParameterObjectLock = "objectLock"
	// ParameterDeleteContents deletes a bucket with its objects: "true" or "false" (default).
	ParameterDeleteContents = "deleteContents"
)

// ParameterAccess is the only parameter of a BucketAccessClass: [ReadWrite] (default) or [ReadOnly].
const ParameterAccess = "access"

// Values of [ParameterAccess].
const (
	ReadWrite = "readWrite"
	ReadOnly  = "readOnly"
)

// properties are what a bucket's class asks for, without the store.
type properties struct {
	versioning, objectLock, deleteContents bool
}

// parseBucket reads the parameters of a BucketClass. The store is empty if they name none.
func parseBucket(parameters map[string]string) (store string, want properties, err error) {
	if err := rpc.CheckMap("parameters", parameters); err != nil {
		return "", want, err
	}
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		value := parameters[key]
		switch key {
		case ParameterStore:
			store = value
		case ParameterVersioning:
			want.versioning, err = parseBool(key, value)
		case ParameterObjectLock:
			want.objectLock, err = parseBool(key, value)
		case ParameterDeleteContents:
			want.deleteContents, err = parseBool(key, value)
		default:
			err = unknownParameter(key, ParameterStore, ParameterVersioning, ParameterObjectLock, ParameterDeleteContents)
		}
		if err != nil {
			return "", want, err
		}
	}
	want.versioning = want.versioning || want.objectLock // S3 locks versions
	return store, want, nil
}

func parseBool(key, value string) (bool, error) {
	switch value {
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	return false, rpc.InvalidArgument("parameter %s: %q is neither \"true\" nor \"false\"", key, value)
}

// parseAccess reads the parameters of a BucketAccessClass.
func parseAccess(parameters map[string]string) (string, error) {
	if err := rpc.CheckMap("parameters", parameters); err != nil {
		return "", err
	}
	access := ReadWrite
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		if key != ParameterAccess {
			return "", unknownParameter(key, ParameterAccess)
		}
		access = parameters[key]
	}
	if access != ReadWrite && access != ReadOnly {
		return "", rpc.InvalidArgument("parameter %s: %q is neither %q nor %q", ParameterAccess, access, ReadWrite, ReadOnly)
	}
	return access, nil
}

func unknownParameter(key string, known ...string) error {
	return rpc.InvalidArgument("parameter %q is unknown: use %s", key, strings.Join(known, ", "))
}

// Tags of a bucket that the driver made. They are permanent: the driver deletes no bucket without tagCluster.
const (
	tagCluster        = "oxide-cosi-cluster"
	tagVersioning     = "oxide-cosi-versioning"
	tagObjectLock     = "oxide-cosi-object-lock"
	tagDeleteContents = "oxide-cosi-delete-contents"
)

func (p properties) tags(cluster string) map[string]string {
	return map[string]string{
		tagCluster:        cluster,
		tagVersioning:     strconv.FormatBool(p.versioning),
		tagObjectLock:     strconv.FormatBool(p.objectLock),
		tagDeleteContents: strconv.FormatBool(p.deleteContents),
	}
}
