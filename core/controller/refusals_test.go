// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestRefusalsExpireAfterTheTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cache := newRefusals()
		want := cache.put(opAttach, "d", "i", errors.New("not stopped"))
		if got := cache.get(opAttach, "d", "i"); !errors.Is(got, want) {
			t.Errorf("got %v", got)
		}
		for _, other := range [][2]string{{"d", "j"}, {"e", "i"}} {
			if got := cache.get(opAttach, other[0], other[1]); got != nil {
				t.Errorf("got %v for another pair", got)
			}
		}
		if got := cache.get(opDetach, "d", "i"); got != nil {
			t.Errorf("got %v for another operation", got)
		}
		time.Sleep(5*time.Second + time.Millisecond)
		if got := cache.get(opAttach, "d", "i"); got != nil {
			t.Errorf("got %v after 5 s", got)
		}
	})
}
