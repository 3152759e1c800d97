#!/usr/bin/env bash
# "promtool test rules" reports SUCCESS for rules that are not there.
#
# Version: prometheus 2.42.0 (Debian 12).
# Guess:   a test that names a missing rule file fails, as "promtool check rules" does. If the file is there, a test of
#          an alert that no rule has fails, or at least warns.
# Seen:    a missing file is a warning, "no file match pattern", and the test passes with status 0, if it expects no
#          alerts. The same test of an alert with a wrong name passes without a word.
# Why:     the names of files are patterns, also without a wildcard, and "no alerts" is all that is compared. A test that
#          an alert stays silent goes on passing when the alert is renamed, or its file moved.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
(apt-get -qq download prometheus=2.42.0+ds-5+deb12u1) 2>log || { cat log >&2; exit 1; }
dpkg-deb -x prometheus_*.deb .
promtool=$dir/usr/bin/promtool
cat >rules.yml <<'END'
groups:
- name: example
  rules:
  - {alert: Down, expr: up == 0}
END
# test FILE ALERT: is the alert silent while the target is down?
test_rules() {
	cat >test.yml <<END
rule_files: [$1]
tests:
- interval: 1m
  input_series: [{series: 'up{job="a"}', values: '0x10'}]
  alert_rule_test: [{eval_time: 5m, alertname: $2, exp_alerts: []}]
END
	local status=0
	"$promtool" test rules test.yml >output 2>&1 || status=$?
	echo "$status"
}
[ "$(test_rules rules.yml Down)" = 1 ] || { echo "changed: the alert that fires passes: $(cat output)" >&2; exit 1; }
[ "$(test_rules rules.yml Dwon)" = 0 ] || { echo "changed: an unknown alert fails" >&2; exit 1; }
! grep -qi warn output || { echo "changed: an unknown alert is a warning" >&2; exit 1; }
[ "$(test_rules missing.yml Down)" = 0 ] || { echo "changed: a missing file fails" >&2; exit 1; }
grep -q 'WARNING: no file match pattern missing.yml' output
! "$promtool" check rules missing.yml >output 2>&1 || { echo "changed: check accepts a missing file" >&2; exit 1; }
echo "still so: promtool passes tests of rules that are not there"
