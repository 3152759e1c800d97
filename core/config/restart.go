// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Bounds of the settings of planned restarts.
const (
	maxRestartWindow  = time.Minute
	maxRestartWait    = 10 * time.Minute
	maxRestartMaxDown = 16
)

// checkPlanning checks the settings of planned restarts.
func (c Config) checkPlanning(p *Problems) {
	oneOf(p, "--restart-shutdown", c.RestartShutdown, ShutdownGuest, ShutdownDrain, ShutdownHard)
	between(p, "--restart-window", c.RestartWindow, 0, maxRestartWindow)
	between(p, "--restart-cool-down", c.RestartCoolDown, 0, 24*time.Hour)
	between(p, "--restart-halt-timeout", c.RestartHaltTimeout, time.Second, time.Hour)
	between(p, "--restart-wait", c.RestartWait, 0, maxRestartWait)
	between(p, "--restart-max-down", c.RestartMaxDown, 1, maxRestartMaxDown)
	if _, err := c.RestartTimes(); err != nil {
		p.add("--restart-hours", "%v", err)
	}
}

// Times are periods of the week, in UTC.
type Times []timesOfDay

// timesOfDay is a period of the day on several days.
type timesOfDay struct {
	days     [7]bool // from Sunday on
	from, to int     // minutes of the day; if to is not after from, it is on the next day
}

var days = []string{"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"}

const minutesOfDay = 24 * 60

// Contains reports whether a moment is in the periods. No periods mean any time.
func (t Times) Contains(at time.Time) bool {
	at = at.UTC()
	day, minute := int(at.Weekday()), at.Hour()*60+at.Minute()
	for _, one := range t {
		switch {
		case one.days[day] && one.from <= minute && (minute < one.to || one.to <= one.from):
			return true
		case one.to <= one.from && one.days[(day+6)%7] && minute < one.to:
			return true
		}
	}
	return len(t) == 0
}

// Next is the first moment in the periods, at or after the given one.
func (t Times) Next(at time.Time) time.Time {
	if t.Contains(at) {
		return at
	}
	midnight := at.UTC().Truncate(24 * time.Hour)
	var next time.Time
	for day := range 8 {
		for _, one := range t {
			begins := midnight.AddDate(0, 0, day).Add(time.Duration(one.from) * time.Minute)
			if one.days[begins.Weekday()] && begins.After(at) && (next.IsZero() || begins.Before(next)) {
				next = begins
			}
		}
	}
	return next
}

// RestartTimes parses RestartHours: the periods in which planned restarts may begin.
func (c Config) RestartTimes() (Times, error) {
	var times Times
	if c.RestartHours == "" {
		return nil, nil
	}
	// A comma separates days and also periods: a part without a time belongs to the next part with a time.
	var listed []string
	for _, part := range strings.Split(c.RestartHours, ",") {
		fields := strings.Fields(part)
		switch len(fields) {
		case 1:
			listed = append(listed, fields[0])
		case 2:
			one, err := parseTimes(append(listed, fields[0]), fields[1])
			if err != nil {
				return nil, err
			}
			times, listed = append(times, one), nil
		default:
			return nil, fmt.Errorf("%s is not days and a time, such as Sat,Sun 01:00-05:00", quote(strings.TrimSpace(part)))
		}
	}
	if len(listed) > 0 {
		return nil, fmt.Errorf("%s has no time after it, such as 01:00-05:00", quote(strings.Join(listed, ",")))
	}
	return times, nil
}

func parseTimes(listed []string, hours string) (timesOfDay, error) {
	var one timesOfDay
	for _, text := range listed {
		first, last, several := strings.Cut(text, "-")
		if !several {
			last = first
		}
		from, to := slices.Index(days, first), slices.Index(days, last)
		if from < 0 || to < 0 {
			return one, fmt.Errorf("%s is not a day or days; write them as in Mon-Fri,Sun", quote(text))
		}
		for day := from; ; day = (day + 1) % len(days) {
			one.days[day] = true
			if day == to {
				break
			}
		}
	}
	begin, end, _ := strings.Cut(hours, "-")
	var errFrom, errTo error
	one.from, errFrom = parseMinute(begin)
	one.to, errTo = parseMinute(end)
	if errFrom != nil || errTo != nil || one.from == minutesOfDay {
		return one, fmt.Errorf("%s is not a time; write it as in 22:00-04:00", quote(hours))
	}
	return one, nil
}

func parseMinute(text string) (int, error) {
	if text == "24:00" {
		return minutesOfDay, nil
	}
	at, err := time.Parse("15:04", text)
	if err != nil || len(text) != len("15:04") {
		return 0, errors.New("no time of day")
	}
	return at.Hour()*60 + at.Minute(), nil
}
