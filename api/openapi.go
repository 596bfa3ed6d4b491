package api

import (
	"net/http"
	"strings"

	"github.com/gin-gonic/gin"
)

// contractVersion is the version of the Agentex contract that the server
// speaks. SDK agents refuse to start on one below 0.1.0.
const contractVersion = "0.1.0"

// The OpenAPI document, as far as we fill it: https://spec.openapis.org/oas/v3.1.0.
type (
	openAPI struct {
		OpenAPI    string                                 `json:"openapi"`
		Info       openAPIInfo                            `json:"info"`
		Paths      map[string]map[string]openAPIOperation `json:"paths"`
		Components openAPIComponents                      `json:"components"`
	}
	openAPIInfo struct {
		Title       string `json:"title"`
		Version     string `json:"version"`
		Description string `json:"description"`
		Binary      string `json:"x-weir-version,omitempty"`
	}
	openAPIOperation struct {
		OperationID string                     `json:"operationId"`
		Summary     string                     `json:"summary"`
		Parameters  []openAPIParameter         `json:"parameters,omitempty"`
		RequestBody *openAPIBody               `json:"requestBody,omitempty"`
		Responses   map[string]openAPIResponse `json:"responses"`
		Security    []map[string][]string      `json:"security"` // [] means none
	}
	openAPIParameter struct {
		Name     string        `json:"name"`
		In       string        `json:"in"`
		Required bool          `json:"required"`
		Schema   openAPISchema `json:"schema"`
	}
	openAPISchema struct {
		Type string `json:"type,omitempty"`
	}
	openAPIBody struct {
		Required bool                    `json:"required"`
		Content  map[string]openAPIMedia `json:"content"`
	}
	openAPIMedia struct {
		Schema openAPISchema `json:"schema"`
	}
	openAPIResponse struct {
		Description string `json:"description"`
	}
	openAPIComponents struct {
		SecuritySchemes map[string]openAPIScheme `json:"securitySchemes"`
	}
	openAPIScheme struct {
		Type   string `json:"type"`
		Scheme string `json:"scheme"`
	}
)

func (s *Server) serveOpenAPI(c *gin.Context) { writeJSON(c, http.StatusOK, s.openAPI()) }

// describeRoutes makes the document of the routes.
func (s *Server) describeRoutes() *openAPI {
	d := &openAPI{
		OpenAPI: "3.1.0",
		Info: openAPIInfo{
			Title: "weir", Version: contractVersion, Binary: s.config.Version,
			Description: "JSON-RPC methods are described by rpc.discover, not here.",
		},
		Paths:      map[string]map[string]openAPIOperation{},
		Components: openAPIComponents{SecuritySchemes: map[string]openAPIScheme{"bearer": {Type: "http", Scheme: "bearer"}}},
	}
	for _, r := range s.routes() {
		var path []string
		op := openAPIOperation{Summary: r.summary, Responses: map[string]openAPIResponse{"200": {"The answer"}}, Security: []map[string][]string{}}
		for part := range strings.SplitSeq(r.path, "/") {
			if name, ok := strings.CutPrefix(part, ":"); ok {
				op.Parameters = append(op.Parameters, openAPIParameter{Name: name, In: "path", Required: true, Schema: openAPISchema{"string"}})
				part = "{" + name + "}"
			}
			path = append(path, part)
		}
		for _, name := range r.query {
			op.Parameters = append(op.Parameters, openAPIParameter{Name: name, In: "query", Schema: openAPISchema{"string"}})
		}
		if r.body {
			op.RequestBody = &openAPIBody{Required: true, Content: map[string]openAPIMedia{"application/json": {}}}
		}
		if !r.public {
			op.Security = []map[string][]string{{"bearer": {}}}
			op.Responses["401"] = openAPIResponse{"No valid credentials"}
		}
		at, method := strings.Join(path, "/"), strings.ToLower(r.method)
		op.OperationID = method + strings.NewReplacer("/", "_", "{", "", "}", "", ".", "_").Replace(at)
		if d.Paths[at] == nil {
			d.Paths[at] = map[string]openAPIOperation{}
		}
		d.Paths[at][method] = op
	}
	return d
}
