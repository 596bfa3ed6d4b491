package api

import (
	"encoding"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/invopop/jsonschema"
)

// plan is how a value of one Go type is decoded and checked. It is compiled
// once, from the type and the JSON Schema that its tags make, so that what is
// published and what is enforced are the same.
type plan struct {
	kind     planKind
	elem     *plan       // of a pointer, list or map
	object   *structPlan // of a struct
	validate bool        // the type has a method Validate

	bits               int // of a number
	minimum, maximum   float64
	above, below       bool // the bounds themselves are not allowed
	minLength          int  // characters of a string, items of a list
	maxLength          int
	maxBytes           int
	pattern            *regexp.Regexp
	strings            []string // enum
	numbers            []float64
	acceptsNull        bool
	minimumS, maximumS string // as they are written
}

type planKind uint8

const (
	kindString planKind = iota
	kindBool
	kindInt
	kindUint
	kindFloat
	kindBytes
	kindStruct
	kindList
	kindMap
	kindPointer
	kindRaw    // json.RawMessage
	kindCustom // decodes itself, or is an interface
)

// structPlan is how a struct is decoded.
type structPlan struct {
	fields []fieldPlan
	byName map[string]int
	strict bool
	rest   []int // index of the field that collects unknown members, or nil
	keyed  int   // which field is idempotencyKey, or -1
}

// maxFields bounds the members of one struct, so that a set of them is a few
// words.
const maxFields = 128

type fieldPlan struct {
	name     string
	index    []int
	plan     *plan
	required bool
	absent   reflect.Value // the default; invalid if there is none
}

// validator is a type that checks itself beyond what tags can say. The error
// is an *InvalidError whose field counts from the value.
type validator interface {
	Validate() error
}

var (
	validatorType       = reflect.TypeFor[validator]()
	unmarshalerType     = reflect.TypeFor[json.Unmarshaler]()
	marshalerType       = reflect.TypeFor[json.Marshaler]()
	textUnmarshalerType = reflect.TypeFor[encoding.TextUnmarshaler]()
	textMarshalerType   = reflect.TypeFor[encoding.TextMarshaler]()
	rawType             = reflect.TypeFor[json.RawMessage]()
	restType            = reflect.TypeFor[map[string]json.RawMessage]()
	timeType            = reflect.TypeFor[time.Time]()
	customSchemaType    = reflect.TypeFor[interface{ JSONSchema() *jsonschema.Schema }]()
)

// reflector returns the reflector of params, or that of results.
func reflector(params, strict bool) *jsonschema.Reflector {
	return &jsonschema.Reflector{
		Anonymous:                  true,
		RequiredFromJSONSchemaTags: params,
		AllowAdditionalProperties:  !strict,
		Mapper:                     mapType,
		Namer:                      typeName,
	}
}

// mapType gives the types that encode themselves a schema.
func mapType(t reflect.Type) *jsonschema.Schema {
	p := reflect.PointerTo(t)
	switch {
	case t == timeType:
		return &jsonschema.Schema{Type: "string", Format: "date-time"}
	case t == rawType || t.Implements(customSchemaType):
		return nil
	case p.Implements(unmarshalerType) || p.Implements(marshalerType):
		panic(fmt.Sprintf("api: %s encodes itself, so it needs a method JSONSchema", t))
	case p.Implements(textUnmarshalerType) || p.Implements(textMarshalerType):
		s := &jsonschema.Schema{Type: "string"}
		if t.Name() == "UUID" {
			s.Format = "uuid"
		}
		return s
	default:
		return nil
	}
}

// typeName names a type in schemas. Page[weir/jobs.Run] is PageRun.
func typeName(t reflect.Type) string {
	name, args, generic := strings.Cut(t.Name(), "[")
	if !generic {
		return name
	}
	for arg := range strings.SplitSeq(strings.TrimSuffix(args, "]"), ",") {
		name += arg[strings.LastIndexAny(arg, "./")+1:]
	}
	return strings.NewReplacer("[", "", "]", "", "*", "").Replace(name)
}

// compile makes the plan of params. It panics if the type cannot be used: that
// is a bug, found by the first test that runs.
func compile(t reflect.Type, strict bool) *plan {
	s := reflector(true, strict).ReflectFromType(t)
	c := planCompiler{definitions: s.Definitions, strict: strict, objects: map[reflect.Type]*structPlan{}}
	return c.plan(t, s, t.String())
}

type planCompiler struct {
	definitions jsonschema.Definitions
	strict      bool
	objects     map[reflect.Type]*structPlan
}

func (c *planCompiler) fail(where, format string, args ...any) {
	panic(fmt.Sprintf("api: %s: %s", where, fmt.Sprintf(format, args...)))
}

func (c *planCompiler) resolve(s *jsonschema.Schema) *jsonschema.Schema {
	if name, ok := strings.CutPrefix(s.Ref, "#/$defs/"); ok {
		return c.definitions[name]
	}
	if len(s.OneOf) == 2 && s.OneOf[1].Type == "null" { // jsonschema:"nullable"
		return c.resolve(s.OneOf[0])
	}
	return s
}

func (c *planCompiler) plan(t reflect.Type, s *jsonschema.Schema, where string) *plan {
	s = c.resolve(s)
	if t.Kind() == reflect.Pointer {
		return &plan{kind: kindPointer, elem: c.plan(t.Elem(), s, where)}
	}
	p := reflect.PointerTo(t)
	n := &plan{validate: p.Implements(validatorType), minimum: math.Inf(-1), maximum: math.Inf(1), maxLength: math.MaxInt, maxBytes: math.MaxInt}
	switch {
	case t == rawType:
		n.kind, n.acceptsNull = kindRaw, true
		return n
	case t.Kind() == reflect.Interface, p.Implements(unmarshalerType):
		n.kind, n.acceptsNull = kindCustom, true
		return n
	case p.Implements(textUnmarshalerType):
		n.kind = kindCustom
		return n
	}
	if len(s.OneOf)+len(s.AnyOf)+len(s.AllOf) > 0 && !n.validate {
		c.fail(where, "alternatives are only checked by a method Validate")
	}
	if s.MultipleOf != "" || s.UniqueItems || s.Not != nil || s.Const != nil {
		c.fail(where, "multipleOf, uniqueItems, not and const are not enforced")
	}
	c.checks(n, s, where)
	switch t.Kind() {
	case reflect.String:
		n.kind = kindString
	case reflect.Bool:
		n.kind = kindBool
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		n.kind, n.bits = kindInt, t.Bits()
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		n.kind, n.bits = kindUint, t.Bits()
	case reflect.Float32, reflect.Float64:
		n.kind, n.bits = kindFloat, t.Bits()
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			n.kind = kindBytes
			break
		}
		n.kind, n.elem = kindList, c.plan(t.Elem(), s.Items, where+"[]")
	case reflect.Map:
		if t.Key().Kind() != reflect.String || t.Key().Implements(textMarshalerType) {
			c.fail(where, "names of members are strings, not %s", t.Key())
		}
		values := s.AdditionalProperties
		if values == nil {
			values = &jsonschema.Schema{}
		}
		n.kind, n.elem = kindMap, c.plan(t.Elem(), values, where+"{}")
	case reflect.Struct:
		n.kind, n.object = kindStruct, c.object(t, s, where)
	default:
		c.fail(where, "params cannot hold a %s", t)
	}
	return n
}

// checks takes the bounds over from the schema.
func (c *planCompiler) checks(n *plan, s *jsonschema.Schema, where string) {
	bound := func(number json.Number) (float64, string) {
		f, err := number.Float64()
		if err != nil {
			c.fail(where, "bad bound %q", number)
		}
		return f, number.String()
	}
	switch {
	case s.Minimum != "":
		n.minimum, n.minimumS = bound(s.Minimum)
	case s.ExclusiveMinimum != "":
		n.minimum, n.minimumS = bound(s.ExclusiveMinimum)
		n.above = true
	}
	switch {
	case s.Maximum != "":
		n.maximum, n.maximumS = bound(s.Maximum)
	case s.ExclusiveMaximum != "":
		n.maximum, n.maximumS = bound(s.ExclusiveMaximum)
		n.below = true
	}
	for _, lengths := range [][2]*uint64{{s.MinLength, s.MaxLength}, {s.MinItems, s.MaxItems}} {
		if lengths[0] != nil {
			n.minLength = int(*lengths[0])
		}
		if lengths[1] != nil {
			n.maxLength = int(*lengths[1])
		}
	}
	if s.Pattern != "" {
		var err error
		if n.pattern, err = regexp.Compile(s.Pattern); err != nil {
			c.fail(where, "%v", err)
		}
	}
	for _, value := range s.Enum {
		switch value := value.(type) {
		case string:
			n.strings = append(n.strings, value)
		case json.Number:
			f, _ := bound(value)
			n.numbers = append(n.numbers, f)
		default:
			c.fail(where, "enum of %T", value)
		}
	}
	switch size := s.Extras["x-max-bytes"].(type) {
	case nil:
	case int:
		n.maxBytes = size
	case string:
		var err error
		if n.maxBytes, err = strconv.Atoi(size); err != nil {
			c.fail(where, "x-max-bytes: %v", err)
		}
		s.Extras["x-max-bytes"] = n.maxBytes // the tag could only say it as text
	}
}

func (c *planCompiler) object(t reflect.Type, s *jsonschema.Schema, where string) *structPlan {
	if o, ok := c.objects[t]; ok {
		return o // a type that holds itself
	}
	o := &structPlan{byName: map[string]int{}, strict: c.strict, keyed: -1}
	c.objects[t] = o
	c.fields(o, t, nil, s, where)
	if len(o.fields) > maxFields {
		c.fail(where, "more than %d members", maxFields)
	}
	return o
}

func (c *planCompiler) fields(o *structPlan, t reflect.Type, index []int, s *jsonschema.Schema, where string) {
	for i := range t.NumField() {
		f := t.Field(i)
		at := append(slices.Clone(index), i)
		if f.Tag.Get("params") == "rest" {
			if f.Type != restType || f.Tag.Get("json") != "-" {
				c.fail(where, "the rest goes into a %s with the tag json:\"-\"", restType)
			}
			o.rest = at
			o.strict = false
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "-" {
			continue
		}
		if f.Anonymous && name == "" {
			if f.Type.Kind() != reflect.Struct {
				c.fail(where, "embeds a %s", f.Type)
			}
			c.fields(o, f.Type, at, s, where)
			continue
		}
		if !f.IsExported() {
			continue
		}
		if name == "" {
			c.fail(where, "field %s has no tag json", f.Name)
		}
		if strings.HasPrefix(name, "_") {
			c.fail(where, "member %s would be stripped", name)
		}
		if _, ok := o.byName[name]; ok {
			c.fail(where, "member %s twice", name)
		}
		property, ok := s.Properties.Get(name)
		if !ok {
			c.fail(where, "member %s is not in the schema", name)
		}
		field := fieldPlan{
			name:     name,
			index:    at,
			plan:     c.plan(f.Type, property, where+"."+name),
			required: slices.Contains(s.Required, name),
		}
		c.lint(f, property, field.plan, where+"."+name)
		if property.Default != nil {
			field.absent = c.value(f.Type, field.plan, property.Default, where+"."+name)
		}
		if name == "idempotencyKey" && f.Type.Kind() == reflect.String {
			o.keyed = len(o.fields)
		}
		o.byName[name] = len(o.fields)
		o.fields = append(o.fields, field)
	}
}

// value decodes a default.
func (c *planCompiler) value(t reflect.Type, n *plan, v any, where string) reflect.Value {
	text, err := json.Marshal(v)
	if err != nil {
		c.fail(where, "default: %v", err)
	}
	value := reflect.New(t).Elem()
	if _, err := n.decode(text, value, ""); err != nil {
		c.fail(where, "default: %v", err)
	}
	return value
}

// The keywords that a tag may give a value. The reflector ignores the others.
var (
	stringKeywords = []string{"minLength", "maxLength", "pattern", "enum", "default", "example"}
	numberKeywords = []string{"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "default", "example"}
)

func (n *plan) keywords() []string {
	switch n.kind {
	case kindPointer:
		return n.elem.keywords()
	case kindString:
		return stringKeywords
	case kindInt, kindUint, kindFloat:
		return numberKeywords
	case kindBool:
		return []string{"default"}
	case kindList:
		of := slices.DeleteFunc(slices.Clone(n.elem.keywords()), func(k string) bool { return k == "default" || k == "example" })
		return append(of, "minItems", "maxItems") // the others are for the items
	default:
		return nil
	}
}

// lint refuses tags that would not be enforced.
func (c *planCompiler) lint(f reflect.StructField, s *jsonschema.Schema, n *plan, where string) {
	if len(s.OneOf) == 2 && s.OneOf[1].Type == "null" {
		s = s.OneOf[0]
	}
	allowed := n.keywords()
	if s.Ref != "" {
		allowed = nil // the type has its own schema, and tags do not reach it
	}
	tag := strings.ReplaceAll(f.Tag.Get("jsonschema"), `\,`, "")
	for word := range strings.SplitSeq(tag, ",") {
		name, _, valued := strings.Cut(word, "=")
		switch {
		case word == "", word == "required", word == "nullable":
		case valued && (name == "title" || name == "description" || slices.Contains(allowed, name)):
		default:
			c.fail(where, "the tag %q means nothing here", word)
		}
	}
	if f.Tag.Get("jsonschema_extras") != "" && (!slices.Contains(allowed, "minLength") || s.Extras["x-max-bytes"] == nil || len(s.Extras) > 1) {
		c.fail(where, "only x-max-bytes of a string is known")
	}
}

// hasKey reports whether params have the member idempotencyKey.
func (n *plan) hasKey() bool {
	return n.object != nil && n.object.keyed >= 0
}
