// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package statefile writes the small files of the state folder.
package statefile

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

// ErrFolder means that a file of the state folder cannot be read, written, locked or removed.
var ErrFolder = fault.StateFolderUnusable.New("state directory cannot be used")

// Write replaces the file at path and makes its folder if it is missing. A reader sees the old content or the whole new
// content, also after the plugin was killed and after a power cut. The new content is in stable storage when Write
// returns. A power cut may still take the file back to its state before the call, because the folder is not flushed.
func Write(path string, content []byte) error {
	file, err := create(path + ".new")
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	if err == nil {
		err = file.Sync()
	}
	err = errors.Join(err, file.Close())
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return nil
}

func create(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if errors.Is(err, os.ErrNotExist) {
		if err = os.MkdirAll(filepath.Dir(path), 0o700); err == nil {
			file, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
		}
	}
	return file, err
}
