// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import "strconv"

// RootFolder is the owner and the mode of the root folder of a new filesystem. Nil keeps what mkfs set.
type RootFolder struct {
	UID, GID *int
	Mode     *uint32
}

// Empty reports whether all values are nil.
func (r RootFolder) Empty() bool { return r.UID == nil && r.GID == nil && r.Mode == nil }

// ParseRootFolder reads [KeyRootUID], [KeyRootGID] and [KeyRootMode] from the parameters of a new volume, or from its
// volume context. It rejects 2^32-1 as an owner, which chown takes for "keep the owner".
func ParseRootFolder(values map[string]string) (root RootFolder, err error) {
	if root.UID, err = parseOwner(values, KeyRootUID); err != nil {
		return RootFolder{}, err
	}
	if root.GID, err = parseOwner(values, KeyRootGID); err != nil {
		return RootFolder{}, err
	}
	if text, ok := values[KeyRootMode]; ok {
		parsed, err := strconv.ParseUint(text, 8, 32)
		if err != nil || parsed > 0o7777 {
			return RootFolder{}, InvalidArgument("%s: %q is not an octal mode such as 0770", KeyRootMode, text)
		}
		mode := uint32(parsed)
		root.Mode = &mode
	}
	return root, nil
}

func parseOwner(values map[string]string, key string) (*int, error) {
	text, ok := values[key]
	if !ok {
		return nil, nil
	}
	parsed, err := strconv.ParseUint(text, 10, 32)
	if err != nil || parsed == 1<<32-1 {
		return nil, InvalidArgument("%s: %q is not a number from 0 to 4294967294", key, text)
	}
	owner := int(parsed)
	return &owner, nil
}
