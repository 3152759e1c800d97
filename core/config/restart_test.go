// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"testing"
	"time"
)

func TestRestartTimes(t *testing.T) {
	at := func(text string) time.Time {
		moment, err := time.Parse("Mon 15:04", text)
		if err != nil {
			t.Fatal(err)
		}
		// 2 March 2025 is a Sunday.
		for moment = time.Date(2025, 3, 2, moment.Hour(), moment.Minute(), 0, 0, time.UTC); moment.Format("Mon") != text[:3]; {
			moment = moment.AddDate(0, 0, 1)
		}
		return moment
	}
	tests := []struct {
		hours        string
		open, closed []string
	}{
		{"", []string{"Sun 00:00", "Wed 12:00"}, nil},
		{"Sat,Sun 01:00-05:00", []string{"Sat 01:00", "Sun 04:59"}, []string{"Sat 00:59", "Sun 05:00", "Mon 02:00"}},
		{
			"Mon-Fri 22:00-04:00",
			[]string{"Mon 22:00", "Tue 03:59", "Sat 03:59"},
			[]string{"Mon 03:00", "Sat 22:00", "Tue 04:00", "Fri 21:59"},
		},
		{"Fri-Mon 10:00-11:00", []string{"Fri 10:00", "Sun 10:30", "Mon 10:59"}, []string{"Tue 10:30", "Thu 10:30"}},
		{
			"Sun 00:00-24:00, Wed 03:00-04:00",
			[]string{"Sun 00:00", "Sun 23:59", "Wed 03:30"},
			[]string{"Mon 00:00", "Wed 04:00"},
		},
		{"Tue 05:00-05:00", []string{"Tue 05:00", "Wed 04:59"}, []string{"Wed 05:00", "Tue 04:59"}},
	}
	for _, test := range tests {
		t.Run(test.hours, func(t *testing.T) {
			times, err := Config{RestartHours: test.hours}.RestartTimes()
			if err != nil {
				t.Fatal(err)
			}
			for _, moment := range test.open {
				if !times.Contains(at(moment)) {
					t.Errorf("%s is not open", moment)
				}
			}
			for _, moment := range test.closed {
				if times.Contains(at(moment)) {
					t.Errorf("%s is open", moment)
				}
			}
			// From any time of the week, Next returns the first open time.
			var next time.Time
			for minute := 2*7*24*60 - 1; minute >= 0; minute-- {
				moment := at("Sun 00:00").Add(time.Duration(minute) * time.Minute)
				if times.Contains(moment) {
					next = moment
				}
				if got := times.Next(moment); minute < 7*24*60 && !got.Equal(next) {
					t.Fatalf(
						"after %s comes %s, want %s",
						moment.Format("Mon 15:04"),
						got.Format("Mon 15:04"),
						next.Format("Mon 15:04"),
					)
				}
			}
		})
	}
}
