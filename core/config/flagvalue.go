// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import "errors"

// SocketFlag is a flag with the plugin's socket, in the notations of --endpoint.
// Its value is the socket's absolute path.
type SocketFlag string

func (f *SocketFlag) String() string { return string(*f) }

// Type implements pflag.Value.
func (f *SocketFlag) Type() string { return "socket" }

// Set implements pflag.Value.
func (f *SocketFlag) Set(text string) error {
	path, err := socketPath(text)
	if err == nil {
		*f = SocketFlag(path)
	}
	return err
}

// SizeFlag is a flag that takes a [Size].
type SizeFlag Size

// String is empty for zero.
func (f *SizeFlag) String() string {
	if *f == 0 {
		return ""
	}
	return Size(*f).String()
}

// Type implements pflag.Value.
func (f *SizeFlag) Type() string { return "size" }

// Set implements pflag.Value.
func (f *SizeFlag) Set(text string) error {
	size, err := parseSize(text)
	if err == nil && size == 0 {
		err = errors.New("is no size: write 1GiB or more")
	}
	if err == nil {
		*f = SizeFlag(size)
	}
	return err
}
