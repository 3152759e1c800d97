package tool

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
)

func TestClaimOutlivesWhoTookIt(t *testing.T) {
	program(t, "mount", "/bin/sleep 600 >/dev/null 2>&1 & echo $!")
	dir, volume := filepath.Join(t.TempDir(), "state"), uuid.New()
	ctx, release, err := Claim(t.Context(), dir, volume, 0)
	if err != nil {
		t.Fatal(err)
	}
	result, err := Run(ctx, "mount")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(result.Stdout))
	if err != nil {
		t.Fatal(err)
	}
	end := func() {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	release()
	if _, _, err := Claim(t.Context(), dir, volume, 0); !errors.Is(err, ErrClaimed) {
		end()
		t.Fatalf("%v while a program is at work, want ErrClaimed", err)
	}
	_, releaseOther, err := Claim(t.Context(), dir, uuid.New(), 0)
	if err != nil {
		t.Errorf("another volume: %v", err)
	} else {
		releaseOther()
	}
	end()
	_, release, err = Claim(t.Context(), dir, volume, time.Minute)
	if err != nil {
		t.Fatalf("after its end: %v", err)
	}
	release()
}

func TestClaimEndsWithItsContext(t *testing.T) {
	dir, volume := t.TempDir(), uuid.New()
	_, release, err := Claim(t.Context(), dir, volume, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := Claim(ctx, dir, volume, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want the context's error", err)
	}
}

func TestClaimWithoutStateFolder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Claim(t.Context(), file, uuid.New(), 0); !errors.Is(err, ErrState) {
		t.Errorf("%v, want ErrState", err)
	}
}
