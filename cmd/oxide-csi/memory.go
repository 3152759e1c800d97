package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

const (
	// gcPercent lets garbage grow to a few times the live heap, which is below 1 MB: at Go's default, a burst of calls
	// spends a tenth of its time on collecting 4 MB again and again (bench, throughput).
	gcPercent = 400
	// nodeGCPercent lets a node's garbage grow to 1 MB. A node has no bursts, and each machine of a cluster has to spare what it
	// takes: at more, what little it does once in ten seconds fills the heap up to there without a collection.
	nodeGCPercent = 25
	// memoryLimit makes the collector work harder before a burst gets near what a container is usually given, in bytes.
	memoryLimit = 64 << 20
	// giveBackPeriod is how often a node gives back what it has used.
	giveBackPeriod = time.Minute
)

func tuneGC(mode config.Mode) {
	percent := gcPercent
	if !mode.Controller() {
		percent = nodeGCPercent
	}
	debug.SetGCPercent(percent)
	debug.SetMemoryLimit(memoryLimit)
}

// keepSmall gives back every minute what was used for once, until ctx ends.
func keepSmall(ctx context.Context, log *slog.Logger) {
	ticker := time.NewTicker(giveBackPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			giveBack(log)
		}
	}
}

// giveBack returns garbage to the system, and the pages of the program itself, which are most of what an idle process holds: the
// kernel maps sixteen of them around each that is run, and most have run once, at the start. The others come back from
// the page cache.
func giveBack(log *slog.Logger) {
	debug.FreeOSMemory()
	if err := unmapCode(); err != nil {
		log.Debug("the program's pages stay mapped", "error", err)
	}
}

// unmapCode takes the program's code out of this process' page tables. Code is mapped from the file and never written, so
// nothing is lost; what else is mapped from the file may have been.
func unmapCode() error {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return err
	}
	own := reflect.ValueOf(unmapCode).Pointer()
	for line := range strings.Lines(string(maps)) {
		var from, to uintptr
		var access string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &access); err != nil {
			return fmt.Errorf("/proc/self/maps has %q: %w", line, err)
		}
		if own < from || to <= own {
			continue
		}
		if access != "r-xp" {
			return fmt.Errorf("the code is mapped %s", access)
		}
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, from, to-from, unix.MADV_DONTNEED); errno != 0 {
			return fmt.Errorf("madvise: %w", errno)
		}
		return nil
	}
	return errors.New("/proc/self/maps does not have the code")
}
