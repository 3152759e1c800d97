// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package admin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// This file has what the command volume does for encrypted volumes.

// passphraseFlags name the files with passphrases. There is no flag for a passphrase: other users see arguments.
type passphraseFlags struct{ now, previous string }

func (f *passphraseFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.now, "passphrase-file", "",
		"file with the passphrase of an encrypted volume, - for stdin; a line break at its end does not count")
	flags.StringVar(&f.previous, "previous-passphrase-file", "",
		"file with the passphrase until now, to change it to that of --passphrase-file")
}

// maxPassphraseBytes is far above any passphrase, and below the limit for a secret.
const maxPassphraseBytes = 1 << 10

// read returns the secrets of NodeStageVolume.
func (f *passphraseFlags) read(stdin io.Reader) (map[string]string, error) {
	if f.previous != "" && (f.now == "" || f.now == f.previous) {
		return nil, Usage("--previous-passphrase-file needs another file in --passphrase-file")
	}
	secrets := map[string]string{}
	for _, from := range []struct{ flag, file, key string }{
		{"--passphrase-file", f.now, rpc.SecretPassphrase},
		{"--previous-passphrase-file", f.previous, rpc.SecretPreviousPassphrase},
	} {
		if from.file == "" {
			continue
		}
		passphrase, err := readPassphrase(from.file, stdin)
		if err != nil {
			return nil, config.Problems{{Flag: from.flag, What: err.Error()}}
		}
		secrets[from.key] = passphrase
	}
	return secrets, nil
}

func readPassphrase(name string, stdin io.Reader) (string, error) {
	from := stdin
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return "", err
		}
		defer func() { _ = file.Close() }() // an error loses nothing: the file was only read
		from = file
	}
	content, err := io.ReadAll(io.LimitReader(from, maxPassphraseBytes+1))
	switch {
	case err != nil:
		return "", err
	case len(content) > maxPassphraseBytes:
		return "", fmt.Errorf("the file has more than %d bytes", maxPassphraseBytes)
	}
	content = bytes.TrimSuffix(content, []byte("\n"))
	if len(content) == 0 {
		return "", errors.New("the file is empty")
	}
	return string(content), nil
}

func (b *storageCommands) headerBackup() *cobra.Command {
	var attachment string
	cmd := &cobra.Command{
		Use:   "header-backup VOLUME FILE",
		Short: "Copy the header of an encrypted volume to a file",
		Long: `header-backup copies the LUKS2 header of an encrypted volume that is attached to this instance to a new FILE of 16 MiB. It
needs root and cryptsetup, but no passphrase. The volume may be in use.

Without its header, the data of a volume is lost, even with the passphrase. Keep the file as safe as the passphrase:
with the file, a passphrase that was valid at the time of the copy opens the disk for ever. Repeat the copy after a change
of the passphrase. To restore a header: cryptsetup luksHeaderRestore.

If the node itself cannot reach a controller, pass the output of attach --json to header-backup --attachment there.`,
		Example:           `  oxide-csi volume header-backup "$id" postgres.header`,
		Args:              exactly("VOLUME", "FILE"),
		ValidArgsFunction: firstArgument(b.completeVolume()),
	}
	cmd.Flags().StringVar(&attachment, "attachment", "", attachmentHelp)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		given, err := readAttachment(attachment, cmd.InOrStdin())
		if err != nil {
			return err
		}
		file, err := filepath.Abs(args[1])
		if err != nil {
			return err
		}
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.HeaderBackup, error) {
			return plugin.BackUpHeader(ctx, args[0], file, given)
		}, func(w io.Writer, h client.HeaderBackup) {
			line(w, "the header of volume "+h.VolumeID+" is in "+h.File)
		})
	}
	return cmd
}
