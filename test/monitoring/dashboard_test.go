// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package monitoring

import (
	"encoding/json"
	"strings"
	"testing"
)

// panel is a panel of the dashboard.
type panel struct {
	ID                       int
	Type, Title, Description string
	GridPos                  struct{ X, Y, W, H int }
	Targets                  []struct {
		RefID              string
		Expr, LegendFormat string
		Datasource         struct{ Type, UID string }
	}
}

func panels(t *testing.T) []panel {
	t.Helper()
	var dashboard struct {
		UID, Title string
		Templating struct {
			List []struct{ Name, Type, Query string }
		}
		Panels []panel
	}
	must(t, json.Unmarshal([]byte(read(t, "deploy/monitoring/dashboard.json")), &dashboard))
	if dashboard.UID == "" || dashboard.Title == "" || len(dashboard.Panels) < 10 {
		t.Fatalf("the dashboard was not understood: %+v", dashboard)
	}
	if list := dashboard.Templating.List; len(list) != 1 || list[0].Name != "datasource" || list[0].Type != "datasource" {
		t.Errorf("the dashboard has the variables %+v, want only the source of data", list)
	}
	return dashboard.Panels
}

// Each panel asks a question, and its queries ask for metrics that exist. No two panels lie over each other.
func TestDashboard(t *testing.T) {
	ids, cells := map[int]bool{}, map[[2]int]string{}
	for _, p := range panels(t) {
		if ids[p.ID] || !strings.HasSuffix(p.Title, "?") || p.Description == "" || len(p.Targets) == 0 {
			t.Errorf("the panel %d, %q, has the description %q and %d queries", p.ID, p.Title, p.Description, len(p.Targets))
		}
		ids[p.ID] = true
		refs := map[string]bool{}
		for _, target := range p.Targets {
			if target.Datasource.Type != "prometheus" || target.Datasource.UID != "${datasource}" || refs[target.RefID] {
				t.Errorf("%q: a query is %+v", p.Title, target)
			}
			refs[target.RefID] = true
			checkQuery(t, p.Title, target.Expr)
		}
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				cell := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if cell[0] >= 24 || cells[cell] != "" {
					t.Fatalf("%q lies over %q, or outside", p.Title, cells[cell])
				}
				cells[cell] = p.Title
			}
		}
	}
}
