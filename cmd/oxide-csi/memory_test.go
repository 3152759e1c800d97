package main

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
)

func TestUnmapCode(t *testing.T) {
	before := residentCode(t)
	if err := unmapCode(); err != nil {
		t.Fatal(err)
	}
	if after := residentCode(t); after >= before {
		t.Errorf("%d kB of the code are resident, %d before", after, before)
	}
}

// residentCode is how much of this program's code is mapped, in kB.
func residentCode(t *testing.T) (kb int) {
	t.Helper()
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	var mine bool
	for line := range strings.Lines(string(smaps)) {
		var from, to uintptr
		if n, _ := fmt.Sscanf(line, "%x-%x r-xp", &from, &to); n == 2 {
			own := reflect.ValueOf(residentCode).Pointer()
			mine = from <= own && own < to
		}
		if n, _ := fmt.Sscanf(line, "Rss: %d kB", &kb); n == 1 && mine {
			return kb
		}
	}
	t.Fatal("the code is not among the mappings")
	return 0
}
