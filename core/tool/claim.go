package tool

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

var (
	// ErrClaimed says that a program which an earlier process has started for the same volume is still at work.
	ErrClaimed = errors.New("a program that was started earlier is still at work")
	// ErrState says that the state folder cannot be used.
	ErrState = errors.New("state folder cannot be used")
)

// claimPoll is how often a claim that somebody else holds is tried again.
const claimPoll = 10 * time.Millisecond

type claimKey struct{}

// Claim claims a volume for this process and for the programs that [Run] runs with the context returned, and waits for
// as long as patience while somebody else holds it; then the error is [ErrClaimed].
//
// A program can outlive the plugin: one that was killed while mount was at work leaves a mount behind that nobody has seen
// yet. So each program inherits the claim, and the claim ends with the last of them. It is a lock on one byte of the file
// <stateDir>/claims, which belongs to the open file (fcntl, F_OFD_SETLK) and not to a process.
func Claim(ctx context.Context, stateDir string, volume uuid.UUID, patience time.Duration) (claimed context.Context, release func(), err error) {
	path := filepath.Join(stateDir, "claims")
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, os.ErrNotExist) {
		if err = os.MkdirAll(stateDir, 0o700); err == nil {
			file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		}
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrState, err)
	}
	// Nothing is ever written to the file: closing it releases the claim and cannot lose anything.
	release = func() { _ = file.Close() }
	if err := lock(ctx, file, volume, patience); err != nil {
		release()
		return nil, nil, err
	}
	return context.WithValue(ctx, claimKey{}, file), release, nil
}

func lock(ctx context.Context, file *os.File, volume uuid.UUID, patience time.Duration) error {
	end := time.Now().Add(patience)
	// Another volume with the same 63 bits would only have to wait.
	place := int64(binary.BigEndian.Uint64(volume[:8])^binary.BigEndian.Uint64(volume[8:])) & math.MaxInt64
	wanted := unix.Flock_t{Type: unix.F_WRLCK, Start: min(place, math.MaxInt64-1), Len: 1}
	for {
		err := unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &wanted)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES):
			return fmt.Errorf("%w: lock %s: %w", ErrState, file.Name(), err)
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(end):
			return ErrClaimed
		}
		time.Sleep(claimPoll)
	}
}

// inherited are the files that a program run with the context inherits: its claim.
func inherited(ctx context.Context) []*os.File {
	if file, ok := ctx.Value(claimKey{}).(*os.File); ok {
		return []*os.File{file}
	}
	return nil
}
